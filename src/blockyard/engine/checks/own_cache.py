"""What transformers' own cache keeps for each layer of a model: keys and values, or something else."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...errors import ModelError
from ..reasons import reason


def require_plain_cache(config: Any) -> None:
    """Raise `ModelError` if transformers' own cache keeps anything but keys and values, such as a state. O(layers)."""
    for layer, kept in enumerate(_kept(config)):
        if type(kept) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ModelError(
                f"generate() keeps a {type(kept).__name__} for layer {layer}; the engine keeps keys and values only"
            )


def own_windows(config: Any) -> dict[int, int]:
    """The last tokens that transformers' own cache keeps for each layer that it has, 0 for all. O(layers)."""
    return {layer: getattr(kept, "sliding_window", None) or 0 for layer, kept in enumerate(_kept(config))}


def require_same_window(layer: int, own: int, window: int, max_model_len: int) -> None:
    """Raise `ModelError` if transformers' own cache keeps another window than the layer's attention asks for."""
    own = own if own < max_model_len else 0
    if own != window:
        raise ModelError(
            f"generate() keeps {f'the last {own}' if own else 'all'} tokens for layer {layer}, whose attention asks "
            f"for {f'the last {window}' if window else 'all'}; the engine cannot compute both"
        )


def _kept(config: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=config).layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"transformers makes no cache for the model: {type(error).__name__}: {reason(error)}"
        ) from error
