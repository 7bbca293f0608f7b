"""What the control plane hands to the data plane: the plan of a step, and of moves between the pools."""

from .buffers import StepBuffers
from .group_plan import GroupPlan
from .step_plan import StepPlan
from .swap_plan import SwapPlan
from .table_changes import TableCopy, TableReader

__all__ = ["GroupPlan", "StepBuffers", "StepPlan", "SwapPlan", "TableCopy", "TableReader"]
