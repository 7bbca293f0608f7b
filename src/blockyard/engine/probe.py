"""What a model asks of its cache, learned by running one token through it, and what it asks that cannot be given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..arguments import require_int
from ..config import MAX_MODEL_LEN
from ..errors import ModelError
from ..sizing import AttentionLayer, KVCacheSpec
from .attention.hook import ATTENTION_NAME
from .borrowing import BorrowedModel
from .reasons import reason

#: Rotary embeddings whose frequencies follow the longest sequence of a batch: cached keys would go stale.
_MOVING_ROPE_TYPES = {"dynamic", "longrope"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """num_layers layers that each keep num_kv_heads keys and values of head_size a token, for max_model_len tokens.

    windows: how many tokens a token attends to in each layer, its own included; 0 for all.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    windows: tuple[int, ...]

    def spec(self, block_size: int, dtype: torch.dtype) -> KVCacheSpec:
        """Bytes and layer groups of a cache for it (`blockyard.sizing`)."""
        layers = tuple(
            AttentionLayer(index, self.num_kv_heads, self.head_size, self.head_size, window)
            for index, window in enumerate(self.windows)
        )
        return KVCacheSpec(layers=layers, block_size=block_size, dtype=str(dtype).removeprefix("torch."))


def probe_model(borrowed: BorrowedModel, max_model_len: int | None = None) -> ModelShape:
    """Run one token through the model and return what its layers ask of a KV cache.

    max_model_len: tokens of the longest sequence; the model's own limit if None. Raises `ModelError`, in a
    sentence, for a model whose attention is not plain causal attention, over all tokens or a window, in every layer.
    """
    model = borrowed.model
    config = model.config.get_text_config(decoder=True)
    limit = _max_model_len(config, max_model_len)
    _refuse_moving_rope(config)
    seen = _run_one_token(borrowed)
    _require_all_layers(seen, config, type(model).__name__)
    layer = seen.layers[0]
    for other in seen.layers.values():
        _require_plain(other, layer)
    return ModelShape(
        num_layers=len(seen.layers),
        num_kv_heads=layer.key_shape[1],
        head_size=layer.key_shape[2],
        max_model_len=limit,
        vocab_size=int(config.vocab_size),
        eos_token_ids=_eos_token_ids(model),
        windows=tuple(_window(seen.layers[index], limit) for index in range(len(seen.layers))),
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    others: dict[str, Any]


@dataclass(slots=True)
class _Recorder:
    """Takes attention's place for one token, whose output is its value, and notes what each layer asks for."""

    layers: dict[int, _Layer] = field(default_factory=dict)

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,  # noqa: ARG002
        others: dict[str, Any],
    ) -> torch.Tensor:
        self.layers[layer] = _Layer(tuple(key.shape), tuple(value.shape), others)
        return value.repeat_interleave(query.shape[0] // value.shape[1], dim=1)


def _run_one_token(borrowed: BorrowedModel) -> _Recorder:
    recorder = _Recorder()
    token = torch.zeros((1, 1), dtype=torch.int64, device=borrowed.device)
    try:
        with borrowed:
            borrowed.forward(token, torch.zeros_like(token), torch.zeros(1, dtype=torch.int64), recorder)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
        raise ModelError(
            f"{type(borrowed.model).__name__} could not run a token through attention of our own: "
            f"{type(error).__name__}: {reason(error)}"
        ) from error
    return recorder


def _require_all_layers(seen: _Recorder, config: Any, name: str) -> None:
    num_layers = int(config.num_hidden_layers)
    if sorted(seen.layers) != list(range(num_layers)):
        raise ModelError(
            f"{name} has {num_layers} layers, of which {len(seen.layers)} use transformers' attention interface "
            f"(registered as '{ATTENTION_NAME}'); the engine needs all of them to"
        )


def _window(layer: _Layer, max_model_len: int) -> int:
    """The layer's sliding window; one that no sequence outgrows is none."""
    window = layer.others.get("sliding_window")
    return int(window) if window is not None and window < max_model_len else 0


def _require_plain(layer: _Layer, first: _Layer) -> None:
    if layer.key_shape != first.key_shape or layer.value_shape != layer.key_shape:
        raise ModelError(
            f"a layer keeps keys of shape {layer.key_shape} and values of shape {layer.value_shape}, the first layer "
            f"keys of {first.key_shape} (tokens, heads, head size); the engine needs them all to be the same"
        )
    for name in ("softcap", "s_aux", "position_bias", "attention_mask"):
        if layer.others.get(name) is not None:
            raise ModelError(f"the model's attention asks for '{name}', which the engine does not support")


def _max_model_len(config: Any, asked: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if asked is None and own is None:
        raise ModelError("the model's config has no max_position_embeddings; pass max_model_len")
    limit = require_int("max_model_len", own if asked is None else asked, 1, MAX_MODEL_LEN)
    if own is not None and limit > own:
        raise ModelError(f"max_model_len is {limit}; the model was made for {own} tokens (max_position_embeddings)")
    return limit


def _refuse_moving_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, dict) and entry.get("rope_type") in _MOVING_ROPE_TYPES:
            raise ModelError(
                f"the model's rotary embedding is of type '{entry['rope_type']}', which changes with the longest "
                f"sequence of a batch, so that cached keys would go stale"
            )


def _eos_token_ids(model: Any) -> frozenset[int]:
    """As `generate()` finds them: the generation config's, else the model's own."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, (list, tuple)) else [found])
    return frozenset()
