"""Cost functions by name: the default `robust`, and those of other routers.

`cost.Cost` is the interface of a new one.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import InvalidArgument
from ..cost import Cost
from .blind import PowerOfTwo, RoundRobin, SessionHash
from .by_hits import Dynamo, LlmD, LMetric, ProductionStack
from .by_trees import AIBrix, Preble, RayAffinity, SGLang
from .robust import Robust

#: All costs by name.
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
    """Return a new cost by name, one of `COSTS`, with its project's default settings.

    Args:
        name: name of the cost.
        seed: seed for costs that draw random numbers.

    Raises:
        InvalidArgument: the name is unknown.
    """
    if name not in COSTS:
        raise InvalidArgument(f"router is {name!r}; it must be one of {', '.join(COSTS)}")
    return COSTS[name](seed=seed) if name in _DRAWING else COSTS[name]()
