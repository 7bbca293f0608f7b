"""Eviction policies: which idle cached block goes next. `base` is the contract, `stack` what a pool asks."""

from __future__ import annotations

from collections.abc import Callable

from ...arguments import shown
from ...errors import InvalidArgument, PolicyError, not_enough_memory
from .base import EvictionPolicy
from .layers.guarded import Guarded
from .learned.auto import Auto
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
    "auto": Auto,
}


def eager_density(num_blocks: int) -> EvictionPolicy:
    """Density as it is inside a guard."""
    return Density(num_blocks, eager=True)


#: Policies that differ inside a guard.
INSIDE_GUARDS: dict[str, Callable[[int], EvictionPolicy]] = {"density": eager_density}
#: What may stand before a name, with a colon, and whether that guard is strict.
GUARDS = {"guarded": False, "strict": True}


def guarded(policy: object, strict: bool) -> Callable[[int], EvictionPolicy]:
    """What makes a guard around `policy`: a name, a class, or any callable that makes one from num_blocks."""
    return lambda num_blocks: Guarded(make_policy(policy, num_blocks), strict)


def _factory_of(policy: object) -> object:
    """What to call with num_blocks; None for an unknown name."""
    if not isinstance(policy, str):
        return policy
    guard, colon, inner = policy.partition(":")
    if colon and guard in GUARDS and inner in POLICIES:
        return guarded(INSIDE_GUARDS.get(inner, inner), GUARDS[guard])
    return POLICIES.get(policy)


def make_policy(policy: object, num_blocks: int) -> EvictionPolicy:
    """A policy over ids 1 to num_blocks - 1, from its name, its class, or any callable that makes it from num_blocks.

    "guarded:density" is a guard around the policy of that name, "strict:density" one with a proved floor.

    Raises `InvalidArgument` for an unknown name, or for what makes no `EvictionPolicy`; `PolicyError` where making one
    raises.
    """
    factory = _factory_of(policy)
    if not callable(factory):
        raise InvalidArgument(
            f"eviction_policy is {shown(policy)}; "
            f"it must be one of {', '.join(sorted(POLICIES))}, one of these after 'guarded:' or 'strict:', "
            f"or make an EvictionPolicy"
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
