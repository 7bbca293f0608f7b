"""This binds tiers to an engine's cache, and says what their objects tell of its model.

Needs the extra `tiers` beside `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ..core.manager import KVCacheManager
from ..core.plan import StepPlan
from ..errors import InvalidArgument, MissingExtra
from ..storage import KVCache, StateSlots

if TYPE_CHECKING:
    from ..tiers import Offload, Tier, TierUse

#: What a config says of where it was read, and not of the model.
_PLACES_IN_CONFIG = ("_name_or_path", "transformers_version")


def fingerprint_of(model: Any) -> dict[str, str]:
    """Return what tells a model from every other: digests of its config and of every bit of its weights. O(weights).

    Needs xxhash; 540 MB take 0.1 s on a CPU.
    """
    try:
        import xxhash
    except ImportError as error:
        raise MissingExtra("tiers need xxhash: pip install 'blockyard[tiers]'") from error
    config = {name: value for name, value in model.config.to_dict().items() if name not in _PLACES_IN_CONFIG}
    weights = xxhash.xxh3_128()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    text = repr(sorted(config.items())).encode()
    return {"config": xxhash.xxh3_128_hexdigest(text), "weights": weights.hexdigest()}


def require_one_rank(**ranks: object) -> None:
    """Raise `InvalidArgument` where ranks are asked for beside tiers: loads are not carried out on the others yet."""
    for name, asked in ranks.items():
        number = getattr(asked, "size", asked)
        if number != 1:
            raise InvalidArgument(f"{name} is {number}; with tiers it must be 1")


def offload_of(
    tiers: Sequence[Tier | TierUse],
    buffer_bytes: int,
    model: Any,
    cache: KVCacheManager,
    kv_cache: KVCache,
    step_tokens: int,
    carry_out: Callable[[StepPlan], None],
    clock: Callable[[], float],
    slots: StateSlots | None,
) -> Offload | None:
    """Return what binds an engine to its tiers; None where there are none. O(weights).

    slots: the states of a hybrid model.

    Raises `InvalidArgument` for an engine that tiers cannot serve, and `MissingExtra`.
    """
    if not tiers:
        return None
    from ..tiers import KVBlocks, Offload, StateObjects

    model_is: list[dict[str, str]] = []

    def model_now() -> dict[str, str]:
        """The fingerprint is taken here once, and again by the offload when the cache was reset."""
        return model_is.pop() if model_is else fingerprint_of(model)

    model_is.append(fingerprint_of(model))
    blocks = KVBlocks(kv_cache, buffer_bytes)
    states = None if slots is None else StateObjects(blocks, slots)
    return Offload(
        cache, blocks, tiers, model_now, step_tokens=step_tokens, on_plan=carry_out, clock=clock, states=states
    )
