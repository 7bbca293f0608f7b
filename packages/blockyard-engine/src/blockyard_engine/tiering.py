"""Connects tiers to an engine's cache, and computes the model's fingerprint for their objects.

Needs the extras `tiers` and `engine`.
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

    from .components import EngineComponents
    from .ranks.leader import Ranks

#: Fields of a config that depend on where it was loaded from.
_LOADING_FIELDS = ("_name_or_path", "transformers_version")


def model_fingerprint(model: Any) -> dict[str, str]:
    """Return digests of a model's config and of all its weights. O(weights).

    Needs xxhash; 540 MB take 0.1 s on a CPU.
    """
    try:
        import xxhash
    except ImportError as error:
        raise MissingExtra("tiers need xxhash: pip install 'blockyard[tiers]'") from error
    config = {name: value for name, value in model.config.to_dict().items() if name not in _LOADING_FIELDS}
    weights = xxhash.xxh3_128()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    text = repr(sorted(config.items())).encode()
    return {"config": xxhash.xxh3_128_hexdigest(text), "weights": weights.hexdigest()}


def make_offload(
    tiers: Sequence[Tier | TierUse],
    buffer_bytes: int,
    components: EngineComponents,
    ranks: Ranks,
    step_tokens: int,
    carry_out: Callable[[StepPlan], None],
    clock: Callable[[], float],
) -> Offload | None:
    """Return the connection of an engine to its tiers; None without tiers. O(weights).

    Raises `InvalidArgument` for an engine that tiers cannot serve, `MissingExtra`, and `RankError` if a rank has ended.
    """
    if not tiers:
        return None
    from blockyard_tiers import Offload

    model, cache = components.patched.model, components.cache
    blocks, states, others = ranks.objects(components.kv_cache, components.shape, buffer_bytes)

    first, first_generation = model_fingerprint(model), cache.generation

    def model_now() -> dict[str, Any]:
        """Return the fingerprint, computed again if the cache was reset: the weights may have changed."""
        own = first if cache.generation == first_generation else model_fingerprint(model)
        return {**own, "ranks": others} if others else own

    return Offload(
        cache, blocks, tiers, model_now, step_tokens=step_tokens, on_plan=carry_out, clock=clock, states=states
    )
