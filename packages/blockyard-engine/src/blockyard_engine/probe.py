"""Learns the shape of a model's cache by running a few tokens, and refuses models that the engine cannot serve."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from blockyard.arguments import reason, require_int
from blockyard.cache_options import MAX_MODEL_LEN
from blockyard.errors import ModelError

from .attention.indexed import learn_index
from .attention.interface import Attend, InOrder
from .attention.softmax import Extras
from .checks.masks import (
    NUM_PROBE_TOKENS,
    keeps_index,
    keeps_states,
    own_windows,
    require_known_cache,
    require_plain_mask,
    require_same_window,
)
from .checks.trial import OWN_LENGTH, SMALL_LENGTH, can_afford, require_equal_logits, small_config, small_model
from .patching import ATTENTION_NAME, PatchedModel
from .shape import KVShape
from .states.learning import learn_states


def probe_model(patched: PatchedModel, max_model_len: int | None = None) -> KVShape:
    """Return the shape of a model's KV cache, after a trial that compares the engine's logits with the model's own.

    The trial runs on a small copy of the model, and on the model itself if that takes only seconds (`checks.trial`).
    Raises `ModelError` for a model whose layers do not all compute causal attention over all tokens or a window.

    Args:
        patched: the model.
        max_model_len: tokens of the longest sequence; None for the model's own limit.
    """
    shape = learn_shape(patched, max_model_len)
    model = patched.model
    facts = (shape, patched.device, patched.dtype, len(list(model.modules())), _text(model.config))
    if _tried.get(model) != facts:
        _try(patched, shape, _try_copy(type(model), model.config))
        _tried[model] = facts
    return shape


#: Facts about each model that has passed its trial; another engine for it does not repeat the trial.
_tried: WeakKeyDictionary[Any, tuple[object, ...]] = WeakKeyDictionary()
#: Classes and configs whose small copy passed (True) or could not be made (False).
_tried_copies: dict[tuple[type, str], bool] = {}


def _try_copy(model_class: type, config: Any) -> bool:
    """Try a small copy; return whether one could be made. Raises `ModelError` if it fails."""
    key = (model_class, _text(config))
    if key not in _tried_copies:
        copy = _small_copy(model_class, config)
        if copy is not None:
            require_equal_logits(*copy, SMALL_LENGTH)
        _tried_copies[key] = copy is not None
    return _tried_copies[key]


def _try(patched: PatchedModel, shape: KVShape, has_copy: bool) -> None:
    """Try the model itself if that takes seconds; beyond its windows if no small copy did that."""
    length = OWN_LENGTH + (0 if has_copy else max(shape.windows))
    if can_afford(patched, length):
        require_equal_logits(patched, shape, length)
    elif not has_copy:
        raise ModelError(
            f"{type(patched.model).__name__} could not be tried: no small copy of it can be made, and {length} tokens "
            f"of it take too long on {patched.device}"
        )


def _text(config: Any) -> str:
    text: str = config.to_json_string(use_diff=False)
    return text


def learn_shape(patched: PatchedModel, max_model_len: int | None = None) -> KVShape:
    """Return the shape of a model's KV cache from its config and a few tokens, without a trial.

    Raises `ModelError` as `probe_model` does.

    Args:
        patched: the model.
        max_model_len: tokens of the longest sequence; None for the model's own limit.
    """
    model = patched.model
    config = model.config.get_text_config(decoder=True)
    limit = _max_model_len(config, max_model_len)
    refuse_unknown_fields(config, limit)
    require_known_cache(config)
    kept = own_windows(config)
    patched.states = patched.index = None  # run the model's own modules
    seen = _run_tokens(patched, is_hybrid=keeps_states(config))
    num_layers = len(kept) if keeps_states(config) else int(config.num_hidden_layers)
    _require_all_layers(seen, num_layers, type(model).__name__)
    layer = seen.layers[0]
    windows = []
    for index, other in sorted(seen.layers.items()):
        _require_alike(index, other, layer)
        window = _window(other, kept.get(index, 0), limit)
        require_plain_mask(index, other.others["attention_mask"], window, limit)
        require_same_window(index, kept.get(index, window), window, limit)
        windows.append(window)
    patched.states = learn_states(model, patched.device) if keeps_states(config) else None
    patched.index = learn_index(model, patched.device) if keeps_index(config) else None
    return KVShape(
        num_layers=len(seen.layers),
        num_kv_heads=layer.key_shape[1],
        head_size=layer.key_shape[2],
        value_size=layer.value_shape[2],
        max_model_len=limit,
        vocab_size=int(config.vocab_size),
        eos_token_ids=_eos_token_ids(model),
        windows=tuple(windows),
        extras=frozenset().union(*(other.extras.names for other in seen.layers.values())),
        states=patched.states,
        index=patched.index,
    )


def _small_copy(model_class: Any, config: Any) -> tuple[PatchedModel, KVShape] | None:
    """Return a small copy and its shape; None if the class cannot be made small."""
    try:
        copy = PatchedModel(small_model(model_class, small_config(config)))
        return copy, learn_shape(copy, SMALL_LENGTH)
    except Exception:  # model classes may raise anything
        return None


@dataclass(frozen=True, slots=True)
class _Layer:
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    others: dict[str, Any]

    @property
    def extras(self) -> Extras:
        return Extras.of(self.others)


@dataclass(slots=True)
class _Recorder:
    """Replaces attention for a few tokens: each attends to itself. Records the arguments of each layer."""

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
        if layer in self.layers:
            raise ModelError(
                f"layer {layer} calls attention more than once per token, which the engine does not support"
            )
        self.layers[layer] = _Layer(tuple(key.shape), tuple(value.shape), others)
        attended = Extras.of(others).keys_and_values(key, value)[1]
        return attended.repeat_interleave(query.shape[0] // attended.shape[1], dim=1)


def _run_tokens(patched: PatchedModel, is_hybrid: bool) -> _Recorder:
    recorder = _Recorder()
    attend: Attend = InOrder(recorder) if is_hybrid else recorder
    tokens = torch.zeros((1, NUM_PROBE_TOKENS), dtype=torch.int64, device=patched.device)
    positions = torch.arange(NUM_PROBE_TOKENS, device=patched.device)[None]
    try:
        with patched.probing():
            patched.forward(tokens, positions, torch.zeros(1, dtype=torch.int64), attend)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(
            f"{type(patched.model).__name__} could not run a token through the engine's attention: "
            f"{type(error).__name__}: {reason(error)}"
        ) from error
    return recorder


def _require_all_layers(seen: _Recorder, num_layers: int, name: str) -> None:
    if num_layers == 0:
        raise ModelError(
            f"{name} has only states and no layer with keys and values; the engine needs at least one such layer"
        )
    if sorted(seen.layers) != list(range(num_layers)):
        raise ModelError(
            f"{name} has {num_layers} layers with keys and values, but only {len(seen.layers)} use transformers' "
            f"attention interface (registered as '{ATTENTION_NAME}'); all of them must"
        )


def _window(layer: _Layer, own: int, max_model_len: int) -> int:
    """Return the layer's sliding window, which some models leave to mask and cache; 0 if no sequence outgrows it."""
    asked = layer.others.get("sliding_window")
    window = own if asked is None else int(asked)
    return window if window < max_model_len else 0


def _require_alike(index: int, layer: _Layer, first: _Layer) -> None:
    if (layer.key_shape, layer.value_shape) != (first.key_shape, first.value_shape):
        raise ModelError(
            f"layer {index} keeps keys of shape {layer.key_shape} and values of shape {layer.value_shape}, layer 0 "
            f"{first.key_shape} and {first.value_shape} (tokens, heads, size); all layers must have the same shapes"
        )
    if layer.key_shape[0] != NUM_PROBE_TOKENS:
        raise ModelError(
            f"layer {index} keeps {layer.key_shape[0]} keys for {NUM_PROBE_TOKENS} tokens; it must keep one per token"
        )
    if layer.others.get("position_bias") is not None:
        raise ModelError("the model's attention uses 'position_bias', which the engine does not support")


def _max_model_len(config: Any, asked: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if asked is None and own is None:
        raise ModelError("the model's config has no max_position_embeddings; pass max_model_len")
    limit = require_int("max_model_len", own if asked is None else asked, 1, MAX_MODEL_LEN)
    if own is not None and limit > own:
        raise ModelError(f"max_model_len is {limit}; the model supports {own} tokens (max_position_embeddings)")
    return limit


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens as `generate()` finds them: the generation config's, else the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, (list, tuple)) else [found])
    return frozenset()


#: Layer types that keep only keys and values, of all tokens or of a window.
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "chunked_attention", "indexed_attention"}
#: Layer types that keep a state, with or without keys and values, or that keep nothing in a model with states.
_STATE_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
#: Rotary embeddings whose frequencies depend on the longest sequence of a batch, which makes cached keys stale.
_MOVING_ROPE_TYPES = {"dynamic", "longrope"}
#: Fields of layers with a state: recurrences, convolutions, linear attention.
_STATE_FIELD = re.compile(r"(^|_)(mamba|ssm|conv|conv1d|recurrent|rnn|lru|rwkv|state|linear)(_|$)")
#: Fields of every config.
_COMMON_FIELDS = {"output_hidden_states"}
#: Fields that change which tokens attend to which: the supported values, and the meaning of all others.
_MASK_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    "alibi": ((False,), "distances are added to the logits"),
    "is_encoder_decoder": ((False,), "tokens attend to those of an encoder"),
    "cross_attention_layers": ((), "tokens attend to another input"),
    "use_bidirectional_attention": ((False, "vision"), "tokens attend to later ones"),
    "prefix_lm": ((False,), "tokens of a prompt attend to later ones"),
    "index_topk": ((), "tokens attend to those that an index selects"),
    "index_topk_blocks": ((), "tokens attend to those that an index selects"),
    "indexer_budget": ((), "tokens attend to those that an index selects"),
    "keep_window_size": ((), "tokens attend to those that a learned mask selects"),
    "compress_rates": ((), "keys and values of several tokens are merged"),
    "attention_type": (("original_full",), "tokens attend to some blocks only"),
}
#: Selection by an index, which the engine supports if transformers' cache keeps the index keys.
_INDEX_FIELD = "index_topk"


def refuse_unknown_fields(config: Any, max_model_len: int) -> None:
    """Raise `ModelError`, naming the field, for a config that asks for an unsupported feature."""
    given = {
        name: value for name, value in config.to_dict().items() if value is not None and name not in _COMMON_FIELDS
    }
    for name, value in given.items():
        if name == _INDEX_FIELD and keeps_index(config):
            continue
        known, meaning = _MASK_FIELDS.get(name, ((value,), ""))
        if value not in known:
            raise ModelError(f"the model's config has {name} = {value!r}: {meaning}, which the engine does not support")
        if _STATE_FIELD.search(name) and value is not False and value != [] and not keeps_states(config):
            raise ModelError(
                f"the model's config has {name} = {value!r}: its layers keep a state that transformers' cache does not "
                f"keep, so the engine cannot keep it either"
            )
    _refuse_layer_types(given.get("layer_types") or ())
    _refuse_chunks(given.get("attention_chunk_size"), max_model_len)
    _refuse_query_scaling(given)
    _refuse_moving_rope(given.get("rope_parameters") or {})


def _refuse_layer_types(kinds: Any) -> None:
    for layer, kind in enumerate(kinds):
        if kind not in _KNOWN_LAYER_TYPES | _STATE_LAYER_TYPES:
            raise ModelError(f"the model's layer_types[{layer}] is {kind!r}, which the engine does not support")


def _refuse_chunks(size: int | None, max_model_len: int) -> None:
    if size is not None and size < max_model_len:
        raise ModelError(
            f"the model's attention_chunk_size is {size}: tokens attend only to their own chunk, which the engine does "
            f"not support; max_model_len={size} makes it one chunk"
        )


def _refuse_query_scaling(given: Mapping[str, Any]) -> None:
    if given.get("attn_temperature_tuning") and 0 in (given.get("no_rope_layers") or ()):
        raise ModelError(
            f"the model's config has attn_temperature_tuning = {given['attn_temperature_tuning']!r}, and "
            "no_rope_layers has a 0: those layers scale a query by its token's index in the step, not by its position"
        )


def _refuse_moving_rope(parameters: Mapping[str, Any]) -> None:
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, Mapping) and entry.get("rope_type") in _MOVING_ROPE_TYPES:
            raise ModelError(
                f"the model's rotary embedding has type '{entry['rope_type']}', which changes with the longest "
                f"sequence of a batch, so cached keys would become stale"
            )
