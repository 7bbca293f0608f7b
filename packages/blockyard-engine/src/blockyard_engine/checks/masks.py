"""Checks that a layer's mask and transformers' own cache fit the attention that the engine computes.

The engine computes causal attention over all tokens or the layer's window, and keeps only keys and values.

A transformers model describes its mask by a function of two positions, from which its attention makes a tensor. The
probe takes the function and evaluates it at the ends of the window and of the longest sequence, so the mask is checked
at its real size at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionMaskInterface, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from blockyard.arguments import reason
from blockyard.errors import ModelError

#: Attention name under which a model passes its mask functions; attention itself is the engine's.
PROBE_NAME = "blockyard_probe"

#: Number of tokens in the probe.
NUM_PROBE_TOKENS = 3
_FUNCTION = "blockyard_mask_function"


def _described(mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
    """Return a dummy mask of the right rank that carries the mask function."""
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool)
    setattr(mask, _FUNCTION, mask_function)
    return mask


AttentionMaskInterface.register(PROBE_NAME, _described)


def require_plain_mask(layer: int, mask: torch.Tensor | None, window: int, max_model_len: int) -> None:
    """Raise `ModelError` if a layer's mask is not that of causal attention over `window` tokens (0: all). O(1).

    `mask` is the layer's mask in the probe; None is causal, by transformers' convention.
    """
    if mask is None:
        return
    function = getattr(mask, _FUNCTION, None)
    if function is None:
        raise ModelError(f"layer {layer} passes its own 'attention_mask', which the engine does not support")
    at = torch.tensor(_positions(window, max_model_len))
    try:
        seen = _seen(function, at)
    except IndexError:  # the function indexes data of the probe's tokens
        at = at[at < NUM_PROBE_TOKENS]
        seen = _seen(function, at)
    query, key = at[:, None], at[None, :]
    expected = (key <= query) & (key > query - (window or max_model_len))
    different = (seen != expected).nonzero()
    if len(different):
        row, column = different[0].tolist()
        does = "does not attend" if expected[row, column] else "attends"
        tokens = f"the last {window}" if window else "all"
        raise ModelError(
            f"in layer {layer} token {int(at[row])} {does} to token {int(at[column])}, which is not causal attention "
            f"over {tokens} tokens; the engine supports no other"
        )


def _seen(function: Callable[..., Any], at: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=torch.int64)
    seen: torch.Tensor = function(zero, zero, at[:, None], at[None, :])
    return seen


def _positions(window: int, max_model_len: int) -> list[int]:
    """Return the positions where a mask is evaluated: around each power of two, and a window before each."""
    near = [2**power + offset for power in range(21) for offset in (-1, 0, 1)]
    near += [max_model_len - 1, *(at - window + offset for at in near for offset in (0, 1))]
    return sorted({at for at in near if 0 <= at < max_model_len})


#: Supported layers of transformers' cache: keys and values, states, or both.
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
_WITH_STATE = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


def require_known_cache(config: Any) -> None:
    """Raise `ModelError` if transformers' own cache keeps anything but keys, values and states. O(layers)."""
    for layer, kept in enumerate(_kept(config)):
        if type(kept) not in (*_PLAIN, *_WITH_STATE, DynamicIndexedLayer):
            raise ModelError(
                f"generate() keeps a {type(kept).__name__} for layer {layer}; the engine keeps only keys, values, "
                f"index keys and states"
            )


def keeps_states(config: Any) -> bool:
    """Return whether transformers' own cache keeps a state for some layer. O(layers)."""
    return any(isinstance(kept, _WITH_STATE) for kept in _kept(config))


def keeps_index(config: Any) -> bool:
    """Return whether transformers' own cache keeps index keys and no states. O(layers)."""
    return all(type(kept) is DynamicIndexedLayer for kept in _kept(config))


def own_windows(config: Any) -> dict[int, int]:
    """Return how many last tokens transformers' own cache keeps for each layer, 0 for all. O(layers).

    For a model with states: for each layer with attention, numbered from 0.
    """
    layers = [kept for kept in _kept(config) if isinstance(kept, CacheLayerMixin)]
    return {number: getattr(kept, "sliding_window", None) or 0 for number, kept in enumerate(layers)}


def require_same_window(layer: int, own: int, window: int, max_model_len: int) -> None:
    """Raise `ModelError` if transformers' own cache keeps another window than the layer's attention uses."""
    own = own if own < max_model_len else 0
    if own != window:
        raise ModelError(
            f"generate() keeps {f'the last {own}' if own else 'all'} tokens for layer {layer}, but its attention reads "
            f"{f'the last {window}' if window else 'all'}; they must be equal"
        )


def _kept(config: Any) -> list[Any]:
    try:
        return list(DynamicCache(config=config).layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"transformers makes no cache for the model: {type(error).__name__}: {reason(error)}"
        ) from error
