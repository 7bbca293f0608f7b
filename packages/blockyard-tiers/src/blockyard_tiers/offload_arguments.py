"""Checks of the arguments of an `Offload`, before anything changes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from blockyard import KVCacheManager
from blockyard.arguments import shown
from blockyard.errors import InvalidArgument

from .engine_memory import Blocks, States
from .pool_names import require_offloadable

_BLOCKS_CALLS = ("layout", "buffer", "read", "write", "object_bytes", "num_rows")
_STATES_CALLS = ("layout", "buffers", "read", "write", "object_bytes", "num_rows")


def require_arguments(
    cache: KVCacheManager,
    blocks: Blocks,
    tiers: object,
    model: object,
    on_plan: object,
    clock: object,
    states: States | None,
) -> None:
    """Raise `InvalidArgument` unless an `Offload` can be created from these."""
    if not isinstance(cache, KVCacheManager):
        raise InvalidArgument(f"cache is {shown(cache)}; it must be a KVCacheManager")
    for name, given, calls in (("blocks", blocks, _BLOCKS_CALLS), ("states", states, _STATES_CALLS)):
        if given is not None or name == "blocks":
            _require_calls(name, given, calls)
    if not isinstance(tiers, Iterable):
        raise InvalidArgument(f"tiers is {shown(tiers)}; it must be an iterable of tiers")
    if not isinstance(model, Mapping) and not callable(model):
        raise InvalidArgument(
            f"model is {shown(model)}; it must be a dict of plain values, or a function that returns one"
        )
    for name, call in (("clock", clock), ("on_plan", on_plan)):
        if not callable(call) and (name == "clock" or call is not None):
            raise InvalidArgument(f"{name} is {shown(call)}; it must be callable")
    require_offloadable(cache, int(blocks.layout().get("shards", 1)))
    config = cache.config
    if on_plan is None and (config.cpu.num_blocks or config.partial_hits or config.has_states):
        raise InvalidArgument(
            "on_plan is None; a cache with a CPU pool, partial hits or states needs it, to carry out the moves of plans"
        )
    if (states is None) == config.has_states:
        wanted = "groups has a StateSpec: pass its states" if states is None else "groups has no StateSpec: pass None"
        raise InvalidArgument(f"states is {shown(states)}; {wanted}")
    if states is not None and blocks.num_rows // 2 <= states.num_rows:
        raise InvalidArgument(
            f"blocks has buffers for {blocks.num_rows} objects of {blocks.object_bytes} bytes; half of them must "
            f"hold a state of {states.object_bytes} bytes and a block"
        )


def require_key(name: str, key: Hashable) -> Hashable:
    """Return a request's key. Raises `InvalidArgument` if it is not hashable."""
    try:
        hash(key)
    except Exception:
        raise InvalidArgument(f"{name} is {shown(key)}; a request's key must be hashable") from None
    return key


def _require_calls(name: str, given: object, calls: tuple[str, ...]) -> None:
    missing = [call for call in calls if not hasattr(given, call)]
    if missing or isinstance(given, type):
        raise InvalidArgument(f"{name} is {shown(given)}; it must have {', '.join(calls)}")
