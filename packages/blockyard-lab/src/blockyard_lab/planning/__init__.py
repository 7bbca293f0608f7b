"""Capacity plans: blocks, requests and hit rates from a model, GPUs and perhaps a trace.

    from blockyard_lab.planning import plan_capacity

Read it in this order:

    memory           amounts of memory, what a step takes, and what of a GPU is left for blocks
    hits             hit rates of what running requests leave
    assumptions      all that a plan takes for granted, in sentences
    capacity         the plan

`docs/planning.md` follows one plan by hand.
"""

from .capacity import CapacityPlan, RequestsAt, plan_capacity
from .memory import LargestStep

__all__ = ["CapacityPlan", "LargestStep", "RequestsAt", "plan_capacity"]
