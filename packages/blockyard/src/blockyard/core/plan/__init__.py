"""What the control plane hands to the data plane: the plan of a step, and of moves between the pools."""

from .buffers import StepBuffers
from .plans import GroupPlan, StepPlan, SwapPlan
from .table_changes import TableCopy, TableReader

__all__ = ["GroupPlan", "StepBuffers", "StepPlan", "SwapPlan", "TableCopy", "TableReader"]
