"""Which kind each layer of a model is: from its list of layer types, or from the rule that stands for the list."""

from __future__ import annotations

from ..errors import InvalidArgument
from .fields import ConfigFields

FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
STATE, CONVOLUTION, HYBRID, NOTHING = "state", "convolution", "hybrid", "nothing"
#: The names that configs give to kinds of layers.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "*": FULL,
    "sliding_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": STATE,
    "mamba": STATE,
    "M": STATE,
    "hybrid": HYBRID,
    "conv": CONVOLUTION,
    "mlp": NOTHING,
    "moe": NOTHING,
    "-": NOTHING,
    "E": NOTHING,
}
#: Models in which every n-th layer is full and the others slide, and whose configs may leave n out.
_PATTERN_DEFAULTS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
#: Models in which every n-th layer has attention and the others a state, and whose configs may leave n out.
_INTERVAL_DEFAULTS = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
#: Fields that only models with states have.
_STATE_FIELDS = ("linear_num_value_heads", "mamba_d_state", "ssm_state_size", "conv_L_cache")
#: Fields that list the layers' types.
_TYPE_FIELDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
#: Models in which every layer slides when the config has a sliding_window and no layer_types.
_ALL_SLIDE = {"mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe", "starcoder2", "doge"}


def layer_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """The kind of each layer, `num_layers` of them.

    A list of types counts first, then a rule. A config with a sliding window and neither is refused unless its model
    is known to slide in every layer, because guessing would promise memory that is not there. O(layers).
    Raises `InvalidArgument` naming the field.
    """
    for name in _TYPE_FIELDS:
        types = _types(fields, name)
        if types is not None:
            return _named_kinds(name, types, num_layers)
    return _ruled_kinds(fields, num_layers)


def num_listed_layers(fields: ConfigFields) -> int | None:
    """Layers of the first list of layer types that there is; None without one."""
    lists = (_types(fields, name) for name in _TYPE_FIELDS)
    return next((len(types) for types in lists if types is not None), None)


def _types(fields: ConfigFields, name: str) -> list[object] | None:
    value = fields.get(name)
    return list(value) if isinstance(value, str) else fields.items(name)


def _named_kinds(name: str, types: list[object], num_layers: int) -> list[str]:
    if len(types) != num_layers:
        raise InvalidArgument(f"{name} has {len(types)} entries; num_hidden_layers is {num_layers}")
    for index, value in enumerate(types):
        if not isinstance(value, str) or value not in _KINDS:
            raise InvalidArgument(
                f"{name}[{index}] is {value!r}; what such a layer keeps is unknown. Known: {', '.join(_KINDS)}"
            )
    return [_KINDS[str(value)] for value in types]


def _ruled_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    if fields.get("attn_layer_period") is not None:  # Jamba
        period, offset = fields.count("attn_layer_period"), fields.count("attn_layer_offset", low=0)
        return [FULL if index % period == offset else STATE for index in range(num_layers)]
    interval = fields.count("full_attention_interval", default=_INTERVAL_DEFAULTS.get(fields.model_type, 0))
    if interval:
        return _every(interval, FULL, STATE, num_layers)
    if fields.model_type == "falcon_h1":
        return [HYBRID] * num_layers
    for name, other in (("attn_layer_indices", STATE), ("full_attn_idxs", CONVOLUTION)):  # Bamba, LFM2
        indices = fields.items(name)
        if indices is not None:
            return [FULL if index in indices else other for index in range(num_layers)]
    _refuse_unplaced_states(fields)
    if fields.get("attention_chunk_size") is not None:  # Llama 4
        return _chunked_kinds(fields, num_layers)
    return _window_kinds(fields, num_layers)


def _refuse_unplaced_states(fields: ConfigFields) -> None:
    for name in _STATE_FIELDS:
        if fields.get(name) is not None:
            raise InvalidArgument(
                f"layer_types is missing; {name} says that layers keep a state, and nothing says which layers do"
            )


def _chunked_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Layers with rotary embeddings attend within their chunk; those without attend to everything."""
    rotary = fields.items("no_rope_layers")  # the field holds 1 where a layer has rotary embeddings
    if rotary:
        if len(rotary) != num_layers:
            raise InvalidArgument(f"no_rope_layers has {len(rotary)} entries; num_hidden_layers is {num_layers}")
        return [CHUNKED if has_rotary else FULL for has_rotary in rotary]
    return _every(fields.count("no_rope_layer_interval", default=4), FULL, CHUNKED, num_layers)


def _window_kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    slides = fields.get("sliding_window") is not None
    if fields.get("use_sliding_window") is not None:  # Qwen2 and Qwen3: the last layers slide, when switched on
        first = fields.count("max_window_layers", low=0) if slides and fields.flag("use_sliding_window") else num_layers
        return [SLIDING if index >= first else FULL for index in range(num_layers)]
    pattern = _pattern(fields)
    if not slides:
        return [FULL] * num_layers
    if isinstance(pattern, str):
        return [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(num_layers)]
    if pattern:
        return _every(pattern, FULL, SLIDING, num_layers)
    if fields.model_type in _ALL_SLIDE:
        return [SLIDING] * num_layers
    raise InvalidArgument(
        f"sliding_window is {fields.get('sliding_window')}, and neither layer_types nor sliding_window_pattern says in "
        f"which layers (model_type is {fields.model_type!r}); add layer_types, or set sliding_window to None"
    )


def _pattern(fields: ConfigFields) -> int | str:
    """Every how many layers one is full, a string of L (local) and G (global), or 0 if nothing says it."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    value = fields.get(*names)
    if isinstance(value, str):
        if not value or set(value) - {"L", "G"}:
            raise InvalidArgument(f"sliding_window_pattern is {value!r}; it must be a number, or letters L and G")
        return value
    return fields.count(*names, default=_PATTERN_DEFAULTS.get(fields.model_type, 0))


def _every(interval: int, last: str, others: str, num_layers: int) -> list[str]:
    """`last` in every `interval`-th layer, `others` before it."""
    return [others if (index + 1) % interval else last for index in range(num_layers)]
