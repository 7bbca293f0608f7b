"""Step buffers, and plans as bytes: `from blockyard.steps import PlanReceiver, PlanSender, StepBuffers`.

A plan can be written into the caller's arrays (`StepBuffers`) or sent to other ranks: see `docs/steps.md`.
"""

from .core.plan import GroupPlan, StepBuffers, SwapPlan
from .errors import DivergedRank
from .wire.plans import PlanReceiver, PlanSender

__all__ = ["DivergedRank", "GroupPlan", "PlanReceiver", "PlanSender", "StepBuffers", "SwapPlan"]
