"""Eviction policies: `base` is the interface, `stack` combines a policy with its layers."""

from __future__ import annotations

from collections.abc import Callable

from ...arguments import shown
from ...errors import InvalidArgument, PolicyError, not_enough_memory
from .base import EvictionPolicy
from .learned.density import Density
from .simple.arc import ARC
from .simple.heaps import FIFO, LFU, Score
from .simple.lru import LRU
from .simple.s3fifo import S3FIFO

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
    """Return an eviction policy made from its name, its class, or a function of `num_blocks`.

    Raises `InvalidArgument` for an unknown name or a result that is no `EvictionPolicy`, and `PolicyError` if the
    function raises.
    """
    factory = POLICIES.get(policy) if isinstance(policy, str) else policy
    if not callable(factory):
        raise InvalidArgument(
            f"eviction_policy is {shown(policy)}; "
            f"it must be one of {', '.join(sorted(POLICIES))}, or make an EvictionPolicy"
        )
    try:
        made = factory(num_blocks)
    except PolicyError:
        raise
    except MemoryError as error:
        raise not_enough_memory(f"eviction_policy: the system has no memory for {num_blocks} blocks", error)
    except Exception as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise PolicyError(f"eviction policy {name}: making it raised {type(error).__name__}: {error}")
    if not isinstance(made, EvictionPolicy):
        raise InvalidArgument(f"eviction_policy makes {shown(made)}; it must make an EvictionPolicy")
    return made
