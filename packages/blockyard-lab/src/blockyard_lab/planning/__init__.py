"""Capacity plans: blocks, requests and hit rates from a model, GPUs and optionally a trace.

    from blockyard_lab.planning import plan_capacity

Read it in this order:

    gpu_memory       memory amounts, the memory of a step, and a GPU's bytes left for blocks
    hits             hit rates in the blocks that running requests leave
    assumptions      everything that a plan assumes, as sentences
    plan, plan_page  the plan as text, JSON and a page
    capacity         computes the plan

`docs/planning.md` follows a plan by hand.
"""

from .capacity import plan_capacity
from .gpu_memory import LargestStep
from .plan import CapacityPlan, RequestsAt

__all__ = ["CapacityPlan", "LargestStep", "RequestsAt", "plan_capacity"]
