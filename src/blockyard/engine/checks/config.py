"""What a config asks for that the engine does not compute, refused by the name of its field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import ModelError

#: Kinds of layers that keep keys and values of all tokens or of a window, and nothing else.
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention", "chunked_attention"}
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


def refuse_unknown_fields(config: Any, max_model_len: int) -> None:
    """Raise `ModelError`, naming the field, for a text config that asks for what the engine does not compute."""
    given = {
        name: value for name, value in config.to_dict().items() if value is not None and name not in _COMMON_FIELDS
    }
    for name, value in given.items():
        known, meaning = _MASK_FIELDS.get(name, ((value,), ""))
        if value not in known:
            raise ModelError(f"the model's config has {name} = {value!r}: {meaning}, which the engine does not compute")
        if _STATE_FIELD.search(name) and value is not False and value != []:
            raise ModelError(
                f"the model's config has {name} = {value!r}: its layers keep a state, the engine keeps none"
            )
    _refuse_layer_types(given.get("layer_types") or ())
    _refuse_chunks(given.get("attention_chunk_size"), max_model_len)
    _refuse_places(given)
    _refuse_moving_rope(given.get("rope_parameters") or {})


def _refuse_layer_types(kinds: Any) -> None:
    for layer, kind in enumerate(kinds):
        if kind not in _KNOWN_LAYER_TYPES:
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
