"""Plans of a step and of moves between the pools, for the engine's workers."""

from .buffers import StepBuffers
from .plans import GroupPlan, StepPlan, SwapPlan
from .table_changes import TableCopy, TableReader

__all__ = ["GroupPlan", "StepBuffers", "StepPlan", "SwapPlan", "TableCopy", "TableReader"]
