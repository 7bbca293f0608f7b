"""Costs by name, each as its owner defines it.

Read `robust` first: it is ours, and the default. `asking.Cost` says what a new one has to have.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import InvalidArgument
from ..asking import Cost
from .blind import PowerOfTwo, RoundRobin, SessionHash
from .by_hits import Dynamo, LlmD, LMetric, ProductionStack
from .by_trees import AIBrix, Preble, RayAffinity, SGLang
from .robust import Robust

#: Costs that `make_cost` knows, by name.
COSTS: dict[str, Callable[..., Cost]] = {
    "robust": Robust,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "llm-d": LlmD,
    "sglang": SGLang,
    "aibrix": AIBrix,
    "preble": Preble,
    "production-stack": ProductionStack,
    "ray-affinity": RayAffinity,
    "power-of-two": PowerOfTwo,
    "round-robin": RoundRobin,
    "session-hash": SessionHash,
}
_DRAWING = {"ray-affinity", "power-of-two"}


def make_cost(name: str, seed: int = 0) -> Cost:
    """Make a cost by its name, one of `COSTS`, as its owner sets it up; the seed is for those that draw.

    Raises `InvalidArgument` for another name.
    """
    if name not in COSTS:
        raise InvalidArgument(f"router is {name!r}; it must be one of {', '.join(COSTS)}")
    return COSTS[name](seed=seed) if name in _DRAWING else COSTS[name]()
