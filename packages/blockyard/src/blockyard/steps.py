"""Plans on their way to the model: `from blockyard.steps import PlanReceiver, PlanSender, StepBuffers`.

A plan is written into arrays of the caller (`StepBuffers`), or sent to other ranks as bytes: see `docs/steps.md`.
"""

from .core.plan import GroupPlan, StepBuffers
from .errors import DivergedRank
from .wire.plans import PlanReceiver, PlanSender

__all__ = ["DivergedRank", "GroupPlan", "PlanReceiver", "PlanSender", "StepBuffers"]
