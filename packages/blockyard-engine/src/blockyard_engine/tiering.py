"""This binds tiers to an engine's cache, and says what their objects tell of its model.

Needs the extra `tiers` beside `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from blockyard import StepPlan
from blockyard.errors import MissingExtra

if TYPE_CHECKING:
    from blockyard_tiers import Offload, Tier, TierUse

    from .assembly import EngineParts
    from .ranks.leader import Ranks

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


def offload_of(
    tiers: Sequence[Tier | TierUse],
    buffer_bytes: int,
    parts: EngineParts,
    ranks: Ranks,
    step_tokens: int,
    carry_out: Callable[[StepPlan], None],
    clock: Callable[[], float],
) -> Offload | None:
    """Return what binds an engine to its tiers; None where there are none. O(weights).

    Raises `InvalidArgument` for an engine that tiers cannot serve, `MissingExtra`, and `RankError` if a rank is lost.
    """
    if not tiers:
        return None
    from blockyard_tiers import Offload

    model, cache = parts.borrowed.model, parts.cache
    blocks, states, others = ranks.objects(parts.kv_cache, parts.shape, buffer_bytes)

    first, first_generation = fingerprint_of(model), cache.generation

    def model_now() -> dict[str, Any]:
        """Return the fingerprint taken here, and a new one after the cache was reset: the weights may be others."""
        own = first if cache.generation == first_generation else fingerprint_of(model)
        return {**own, "ranks": others} if others else own

    return Offload(
        cache, blocks, tiers, model_now, step_tokens=step_tokens, on_plan=carry_out, clock=clock, states=states
    )
