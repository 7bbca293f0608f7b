"""What the control plane hands to the data plane: the plan of a step, and of moves between the pools."""

from .buffers import StepBuffers
from .group_plan import GroupPlan
from .receiver import PlanReceiver
from .sender import PlanSender
from .step_plan import StepPlan
from .swap_plan import SwapPlan

__all__ = ["GroupPlan", "PlanReceiver", "PlanSender", "StepBuffers", "StepPlan", "SwapPlan"]
