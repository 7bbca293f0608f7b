"""What a model asks of its cache, learned by running a few tokens through it, and what it asks that cannot be given."""

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
from .borrowing import ATTENTION_NAME, BorrowedModel
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
from .shape import KVShape
from .states.learning import learn_states


def probe_model(borrowed: BorrowedModel, max_model_len: int | None = None) -> KVShape:
    """Return what a model's layers ask of a KV cache, after a trial that the engine computes what the model does.

    max_model_len: tokens of the longest sequence; the model's own limit if None. Raises `ModelError`, in a
    sentence, for a model whose attention is not causal attention, over all tokens or a window, in every layer.
    The trial is run on a small copy of the model, and on the model itself where that takes seconds (`checks.trial`).
    """
    shape = learn_shape(borrowed, max_model_len)
    model = borrowed.model
    facts = (shape, borrowed.device, borrowed.dtype, len(list(model.modules())), _text(model.config))
    if _tried.get(model) != facts:
        _try(borrowed, shape, _try_copy(type(model), model.config))
        _tried[model] = facts
    return shape


#: What each model was when it passed its trial: an engine for the same model again does not repeat it.
_tried: WeakKeyDictionary[Any, tuple[object, ...]] = WeakKeyDictionary()
#: Classes and configs of which a small copy passed (True), or none could be made (False).
_tried_copies: dict[tuple[type, str], bool] = {}


def _try_copy(model_class: type, config: Any) -> bool:
    """Try a small copy; returns whether there is one. Raises `ModelError` if it fails."""
    key = (model_class, _text(config))
    if key not in _tried_copies:
        copy = _small_copy(model_class, config)
        if copy is not None:
            require_equal_logits(*copy, SMALL_LENGTH)
        _tried_copies[key] = copy is not None
    return _tried_copies[key]


def _try(borrowed: BorrowedModel, shape: KVShape, has_copy: bool) -> None:
    """Try the model itself: beyond its windows if no small copy did that, and if it takes seconds."""
    length = OWN_LENGTH + (0 if has_copy else max(shape.windows))
    if can_afford(borrowed, length):
        require_equal_logits(borrowed, shape, length)
    elif not has_copy:
        raise ModelError(
            f"{type(borrowed.model).__name__} could not be tried: no small copy of it can be made, and {length} tokens "
            f"of it take too long on {borrowed.device}"
        )


def _text(config: Any) -> str:
    text: str = config.to_json_string(use_diff=False)
    return text


def learn_shape(borrowed: BorrowedModel, max_model_len: int | None = None) -> KVShape:
    """Does as `probe_model`, from the config and a few tokens alone."""
    model = borrowed.model
    config = model.config.get_text_config(decoder=True)
    limit = _max_model_len(config, max_model_len)
    refuse_unknown_fields(config, limit)
    require_known_cache(config)
    kept = own_windows(config)
    borrowed.states = borrowed.index = None  # what it runs here are its own modules
    seen = _run_tokens(borrowed, is_hybrid=keeps_states(config))
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
    borrowed.states = learn_states(model, borrowed.device) if keeps_states(config) else None
    borrowed.index = learn_index(model, borrowed.device) if keeps_index(config) else None
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
        states=borrowed.states,
        index=borrowed.index,
    )


def _small_copy(model_class: Any, config: Any) -> tuple[BorrowedModel, KVShape] | None:
    """Return a small copy and its shape; None where the class cannot be made small."""
    try:
        copy = BorrowedModel(small_model(model_class, small_config(config)))
        return copy, learn_shape(copy, SMALL_LENGTH)
    except Exception:  # classes of models raise whatever they like
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
    """Takes attention's place for some tokens, each attending to itself, and notes what each layer asks for."""

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
            raise ModelError(f"layer {layer} calls attention more than once a token, which the engine does not compute")
        self.layers[layer] = _Layer(tuple(key.shape), tuple(value.shape), others)
        attended = Extras.of(others).attended(key, value)[1]
        return attended.repeat_interleave(query.shape[0] // attended.shape[1], dim=1)


def _run_tokens(borrowed: BorrowedModel, is_hybrid: bool) -> _Recorder:
    recorder = _Recorder()
    attend: Attend = InOrder(recorder) if is_hybrid else recorder
    tokens = torch.zeros((1, NUM_PROBE_TOKENS), dtype=torch.int64, device=borrowed.device)
    positions = torch.arange(NUM_PROBE_TOKENS, device=borrowed.device)[None]
    try:
        with borrowed.probing():
            borrowed.forward(tokens, positions, torch.zeros(1, dtype=torch.int64), attend)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(
            f"{type(borrowed.model).__name__} could not run a token through attention of our own: "
            f"{type(error).__name__}: {reason(error)}"
        ) from error
    return recorder


def _require_all_layers(seen: _Recorder, num_layers: int, name: str) -> None:
    if num_layers == 0:
        raise ModelError(
            f"{name} has states alone, and no layer with keys and values; the engine needs one beside them"
        )
    if sorted(seen.layers) != list(range(num_layers)):
        raise ModelError(
            f"{name} has {num_layers} layers that keep keys and values, of which {len(seen.layers)} use transformers' "
            f"attention interface (registered as '{ATTENTION_NAME}'); the engine needs all of them to"
        )


def _window(layer: _Layer, own: int, max_model_len: int) -> int:
    """The layer's sliding window, which some leave to the mask and the cache; one that no sequence outgrows is none."""
    asked = layer.others.get("sliding_window")
    window = own if asked is None else int(asked)
    return window if window < max_model_len else 0


def _require_alike(index: int, layer: _Layer, first: _Layer) -> None:
    if (layer.key_shape, layer.value_shape) != (first.key_shape, first.value_shape):
        raise ModelError(
            f"layer {index} keeps keys of shape {layer.key_shape} and values of shape {layer.value_shape}, layer 0 "
            f"{first.key_shape} and {first.value_shape} (tokens, heads, size); the engine needs them all to be the same"
        )
    if layer.key_shape[0] != NUM_PROBE_TOKENS:
        raise ModelError(
            f"layer {index} keeps {layer.key_shape[0]} keys for {NUM_PROBE_TOKENS} tokens; the engine needs one each"
        )
    if layer.others.get("position_bias") is not None:
        raise ModelError("the model's attention asks for 'position_bias', which the engine does not support")


def _max_model_len(config: Any, asked: int | None) -> int:
    own = getattr(config, "max_position_embeddings", None)
    if asked is None and own is None:
        raise ModelError("the model's config has no max_position_embeddings; pass max_model_len")
    limit = require_int("max_model_len", own if asked is None else asked, 1, MAX_MODEL_LEN)
    if own is not None and limit > own:
        raise ModelError(f"max_model_len is {limit}; the model was made for {own} tokens (max_position_embeddings)")
    return limit


def _eos_token_ids(model: Any) -> frozenset[int]:
    """As `generate()` finds them: the generation config's, else the model's own."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, (list, tuple)) else [found])
    return frozenset()


#: Kinds of layers that keep keys and values of all tokens or of a window, and nothing else.
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "chunked_attention", "indexed_attention"}
#: Kinds that keep a state, beside keys and values or alone, and those that keep nothing in a model that has states.
_STATE_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
#: Rotary embeddings whose frequencies follow the longest sequence of a batch: cached keys would go stale.
_MOVING_ROPE_TYPES = {"dynamic", "longrope"}
#: Fields of layers that keep a state: of a recurrence, a convolution or linear attention.
_STATE_FIELD = re.compile(r"(^|_)(mamba|ssm|conv|conv1d|recurrent|rnn|lru|rwkv|state|linear)(_|$)")
#: Fields that every config has, whatever its model.
_COMMON_FIELDS = {"output_hidden_states"}
#: Fields that say who attends to whom: the values under which that is what the engine computes, and what else it is.
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


#: It says that tokens attend to those that an index selects, which the engine computes through transformers' cache.
_INDEX_FIELD = "index_topk"


def refuse_unknown_fields(config: Any, max_model_len: int) -> None:
    """Raise `ModelError`, naming the field, for a text config that asks for what the engine does not compute."""
    given = {
        name: value for name, value in config.to_dict().items() if value is not None and name not in _COMMON_FIELDS
    }
    for name, value in given.items():
        if name == _INDEX_FIELD and keeps_index(config):
            continue
        known, meaning = _MASK_FIELDS.get(name, ((value,), ""))
        if value not in known:
            raise ModelError(f"the model's config has {name} = {value!r}: {meaning}, which the engine does not compute")
        if _STATE_FIELD.search(name) and value is not False and value != [] and not keeps_states(config):
            raise ModelError(
                f"the model's config has {name} = {value!r}: its layers keep a state, and transformers' cache for it "
                f"keeps none, so that the engine cannot either"
            )
    _refuse_layer_types(given.get("layer_types") or ())
    _refuse_chunks(given.get("attention_chunk_size"), max_model_len)
    _refuse_places(given)
    _refuse_moving_rope(given.get("rope_parameters") or {})


def _refuse_layer_types(kinds: Any) -> None:
    for layer, kind in enumerate(kinds):
        if kind not in _KNOWN_LAYER_TYPES | _STATE_LAYER_TYPES:
            raise ModelError(
                f"the model's layer_types[{layer}] is {kind!r}, a kind of layer that the engine does not know"
            )


def _refuse_chunks(size: int | None, max_model_len: int) -> None:
    if size is not None and size < max_model_len:
        raise ModelError(
            f"the model's attention_chunk_size is {size}: tokens attend to their own chunk only, which the engine does "
            f"not compute; with max_model_len={size} there is one chunk"
        )


def _refuse_places(given: Mapping[str, Any]) -> None:
    if given.get("attn_temperature_tuning") and 0 in (given.get("no_rope_layers") or ()):
        raise ModelError(
            f"the model's config has attn_temperature_tuning = {given['attn_temperature_tuning']!r}, and "
            "no_rope_layers has a 0: those layers scale a query by its token's place in the row of a step, not by its "
            "position"
        )


def _refuse_moving_rope(parameters: Mapping[str, Any]) -> None:
    for entry in (parameters, *parameters.values()):
        if isinstance(entry, Mapping) and entry.get("rope_type") in _MOVING_ROPE_TYPES:
            raise ModelError(
                f"the model's rotary embedding is of type '{entry['rope_type']}', which changes with the longest "
                f"sequence of a batch, so that cached keys would go stale"
            )
