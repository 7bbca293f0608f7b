"""Eviction policies: which idle cached block goes next. Each is one file; `base` is the contract."""

from __future__ import annotations

from collections.abc import Callable

from ...arguments import shown
from ...errors import InvalidArgument, PolicyError, not_enough_memory
from .arc import ARC
from .base import EvictionPolicy
from .density import Density
from .fifo import FIFO
from .lfu import LFU
from .lru import LRU
from .s3fifo import S3FIFO
from .score import Score

#: Names for `CacheConfig(eviction_policy=...)`.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "s3fifo": S3FIFO,
    "arc": ARC,
    "score": Score,
    "density": Density,
}


def make_policy(policy: object, num_blocks: int) -> EvictionPolicy:
    """A policy over ids 1 to num_blocks - 1, from its name, its class, or any callable that makes it from num_blocks.

    Raises `InvalidArgument` for an unknown name, or for what makes no `EvictionPolicy`; `PolicyError` where making one
    raises.
    """
    factory = POLICIES.get(policy) if isinstance(policy, str) else policy
    if not callable(factory):
        raise InvalidArgument(
            f"eviction_policy is {shown(policy)}; "
            f"it must be one of {', '.join(sorted(POLICIES))}, or make an EvictionPolicy"
        )
    try:
        made = factory(num_blocks)
    except MemoryError as error:
        raise not_enough_memory(f"eviction_policy: the system has no memory for {num_blocks} blocks", error)
    except Exception as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise PolicyError(f"eviction policy {name}: making it raised {type(error).__name__}: {error}")
    if not isinstance(made, EvictionPolicy):
        raise InvalidArgument(f"eviction_policy makes {shown(made)}; it must make an EvictionPolicy")
    return made
