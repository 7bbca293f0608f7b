"""The kind of each layer of a model, from a list in its config or the rule of its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..arguments import require_int, shown
from ..errors import InvalidArgument
from .config_fields import ConfigFields

FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
STATE, CONVOLUTION, HYBRID, NOTHING = "state", "convolution", "hybrid", "nothing"
#: Full attention that also keeps the keys by which sparse attention selects tokens.
INDEXED = "indexed"
#: Ten times the layers of the deepest models; each layer is an object.
MAX_LAYERS = 4096
#: Kinds by their names in configs.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "indexed_attention": FULL,
    "deepseek_sparse_attention": FULL,
    "minimax_m3_sparse": INDEXED,
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
#: Fields that list the layers' types.
_TYPE_FIELDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
#: A function from a config's fields and the number of layers to the kinds of the layers.
LayerRule = Callable[[ConfigFields, int], list[str]]


def layer_kinds(fields: ConfigFields, num_layers: int, rule: LayerRule) -> list[str]:
    """Return the kind of each layer, from a list in the config or else by the family's rule. O(layers).

    Raises `InvalidArgument` naming the field that is missing, has another length, or is not understood.
    """
    for name in _TYPE_FIELDS:
        types = _types(fields, name)
        if types is not None:
            return _named_kinds(name, types, num_layers, fields.count("num_nextn_predict_layers", low=0, default=0))
    return rule(fields, num_layers)


def num_listed_layers(fields: ConfigFields) -> int | None:
    """Return the length of the first list of layer types in the config; None without one."""
    lists = (_types(fields, name) for name in _TYPE_FIELDS)
    return next((len(types) for types in lists if types is not None), None)


def _types(fields: ConfigFields, name: str) -> list[object] | None:
    value = fields.get(name)
    return list(value) if isinstance(value, str) else fields.items(name)


def _named_kinds(name: str, types: list[object], num_layers: int, num_predicting: int) -> list[str]:
    if len(types) == num_layers + num_predicting:  # Step 3.5 also lists the draft layers
        types = types[:num_layers]
    if len(types) != num_layers:
        raise InvalidArgument(f"{name} has {len(types)} entries; num_hidden_layers is {num_layers}")
    for index, value in enumerate(types):
        if not isinstance(value, str) or value not in _KINDS:
            raise InvalidArgument(f"{name}[{index}] is {shown(value)}; it must be one of {', '.join(_KINDS)}")
    return [_KINDS[str(value)] for value in types]


# ---------------------------------------------------------------- all layers alike


def all_full(_fields: ConfigFields, num_layers: int) -> list[str]:
    return [FULL] * num_layers


def all_states(_fields: ConfigFields, num_layers: int) -> list[str]:
    return [STATE] * num_layers


def all_hybrid(_fields: ConfigFields, num_layers: int) -> list[str]:
    """Return attention and a state, side by side, for every layer."""
    return [HYBRID] * num_layers


def require_list(_fields: ConfigFields, _num_layers: int) -> list[str]:
    """Raise `InvalidArgument`, for families whose configs must list the kinds of the layers."""
    raise InvalidArgument(
        "layer_types is missing; the config must list which layers have attention (transformers.AutoConfig adds it)"
    )


# ---------------------------------------------------------------- windows


def all_slide(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return sliding for all layers if the config has a window that is not switched off."""
    switch = fields.get("use_sliding_window")
    slides = fields.get("sliding_window") is not None and (switch is None or fields.flag("use_sliding_window"))
    return [SLIDING if slides else FULL] * num_layers


def last_slide(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return sliding for the layers from `max_window_layers` on, if windows are switched on (Qwen2, Qwen3)."""
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return [FULL] * num_layers
    first = fields.count("max_window_layers", low=0)
    return [SLIDING if index >= first else FULL for index in range(num_layers)]


def no_windows(fields: ConfigFields, num_layers: int) -> list[str]:
    """Reject configs that switch a window on, because this family's code has none (Ling)."""
    if fields.flag("use_sliding_window"):
        raise InvalidArgument("use_sliding_window is true; it must be false: this model is not known to have windows")
    return [FULL] * num_layers


def full_if_equal(field: str, known: str) -> LayerRule:
    """Return a rule for families with full attention in all layers that requires `field` to be absent or `known`."""

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        if fields.get(field) not in (None, known):
            raise InvalidArgument(f"{field} is {shown(fields.get(field))}; it must be {known!r} for this model")
        return [FULL] * num_layers

    return rule


def windows_from(field: str) -> LayerRule:
    """Return a rule: the layers from number `field` on slide, if there is a window."""

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        first = num_layers if fields.get("sliding_window") is None else fields.count(field, low=0)
        return [SLIDING if index >= first else FULL for index in range(num_layers)]

    return rule


def alternate_when_on(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return sliding for every other layer up to `max_window_layers`, if windows are switched on (Qwen2-MoE)."""
    if not fields.flag("use_sliding_window"):
        return [FULL] * num_layers
    end = fields.count("max_window_layers", low=0)
    return [FULL if index % 2 or index >= end else SLIDING for index in range(num_layers)]


def last_of(interval: int, field: str = "sliding_window_pattern", ends_full: bool = False) -> LayerRule:
    """Return a rule: the last of every `interval` layers is full, the others slide.

    Args:
        interval: default interval.
        field: field that overrides the interval, or has a string of L (local) and G (global).
        ends_full: whether the last layer is always full.
    """

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        pattern = fields.get(field, f"_{field}")
        if fields.get("sliding_window") is None:
            return [FULL] * num_layers
        if isinstance(pattern, str):
            return _lettered(field, pattern, num_layers)
        kinds = every(fields.count(field, f"_{field}", default=interval), FULL, SLIDING, num_layers)
        return [*kinds[:-1], FULL] if ends_full else kinds

    return rule


def _lettered(field: str, pattern: str, num_layers: int) -> list[str]:
    if not pattern or set(pattern) - {"L", "G"}:
        raise InvalidArgument(f"{field} is {shown(pattern)}; it must be a number, or letters L and G")
    return [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(num_layers)]


def first_of(interval: int, field: str = "") -> LayerRule:
    """Return a rule: the first of every `interval` layers is full. `field`, if given, overrides the interval."""

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        step = fields.count(field, default=interval) if field else interval
        return [SLIDING if index % step else FULL for index in range(num_layers)]

    return rule


def counted_backwards(interval: int) -> LayerRule:
    """Return a rule: every `interval`-th layer is full, counted from the last one."""

    def rule(_fields: ConfigFields, num_layers: int) -> list[str]:
        return [SLIDING if (num_layers - 1 - index) % interval else FULL for index in range(num_layers)]

    return rule


def first_and_every(interval: int) -> LayerRule:
    """Return a rule: by default, the first layer and the last of every `interval` layers are full."""

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        listed = fields.items("hybrid_layer_pattern")
        if listed is not None:
            return [SLIDING if value else FULL for value in exactly("hybrid_layer_pattern", listed, num_layers)]
        kinds = every(interval, FULL, SLIDING, num_layers)
        return [FULL, *kinds[1:]]

    return rule


def prefixed(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return the kinds of layers with another interval for the dense first layers (Cohere 2 MoE)."""
    dense = min(fields.count("first_k_dense_replace", low=0, default=0), num_layers)
    first = every(fields.count("prefix_dense_sliding_window_pattern"), FULL, SLIDING, dense)
    return first + every(fields.count("sliding_window_pattern"), FULL, SLIDING, num_layers - dense)


def rotary_slide(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return sliding for layers without rotary embeddings, if windows are switched on (SmolLM 3)."""
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return [FULL] * num_layers
    return [FULL if has_rotary else SLIDING for has_rotary in _rotary(fields, num_layers)]


def chunks(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return chunked attention for layers with rotary embeddings and full attention for the others (Llama 4)."""
    if fields.get("attention_chunk_size") is None:
        return [FULL] * num_layers
    return [CHUNKED if has_rotary else FULL for has_rotary in _rotary(fields, num_layers)]


def _rotary(fields: ConfigFields, num_layers: int) -> list[bool]:
    listed = fields.items("no_rope_layers")  # despite the name, 1 means that a layer has rotary embeddings
    if listed:
        return [bool(value) for value in exactly("no_rope_layers", listed, num_layers)]
    return [kind == STATE for kind in every(fields.count("no_rope_layer_interval"), FULL, STATE, num_layers)]


def local_and_global(fields: ConfigFields, num_layers: int) -> list[str]:
    """Check `attention_types`, pairs of kinds and repetitions (GPT-Neo). All layers keep all tokens."""
    kinds = fields.items("attention_layers")
    if kinds is None:
        kinds = []
        for pair in fields.items("attention_types") or []:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], (list, tuple)):
                raise InvalidArgument(f"attention_types holds {shown(pair)}; its items must be [kinds, count]")
            kinds += list(pair[0]) * require_int("attention_types", pair[1], 1, MAX_LAYERS)
    for kind in kinds:
        if kind not in ("local", "global"):
            raise InvalidArgument(f"attention_types names {shown(kind)}; it must be local or global")
    # transformers masks local layers but keeps all their tokens, and so does every engine that supports the model.
    exactly("attention_types", kinds, num_layers)
    return [FULL] * num_layers


# ---------------------------------------------------------------- states


def every(interval: int, last: str, others: str, num_layers: int) -> list[str]:
    """Return `last` for every `interval`-th layer and `others` for the rest."""
    return [others if (index + 1) % interval else last for index in range(num_layers)]


def attention_every(interval: int) -> LayerRule:
    """Return a rule: the last of every `full_attention_interval` layers has attention, the others have states."""

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        return every(fields.count("full_attention_interval", default=interval), FULL, STATE, num_layers)

    return rule


def attention_every_or_last(interval: int) -> LayerRule:
    """Return a rule: the last of every `interval` layers has attention; if there are fewer layers, the last one."""

    def rule(_fields: ConfigFields, num_layers: int) -> list[str]:
        kinds = every(interval, FULL, STATE, num_layers)
        return kinds if FULL in kinds else [*kinds[:-1], FULL]

    return rule


def alternating_states(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return the kinds in `attn_type_list`, 1 for attention and 0 for a state.

    By default attention and states alternate (MiniMax-Text-01).
    """
    listed = fields.items("attn_type_list")
    if listed is not None:
        return [FULL if value else STATE for value in exactly("attn_type_list", listed, num_layers)]
    return every(2, STATE, FULL, num_layers)


def attention_by_period(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return attention at `attn_layer_offset` of every `attn_layer_period` layers, states elsewhere (Jamba)."""
    period, offset = fields.count("attn_layer_period"), fields.count("attn_layer_offset", low=0)
    return [FULL if index % period == offset else STATE for index in range(num_layers)]


def attention_at(field: str, other: str) -> LayerRule:
    """Return a rule: the layers that `field` lists have attention, the others are of kind `other`."""

    def rule(fields: ConfigFields, num_layers: int) -> list[str]:
        indices = fields.items(field)
        if indices is None:
            raise InvalidArgument(
                f"{field} and layer_types are missing; one of them must list which layers have attention"
            )
        return [FULL if index in indices else other for index in range(num_layers)]

    return rule


def grouped(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return attention for the last of every `layer_group_size` layers and for the layers after the last group.

    For Ling and Ring.
    """
    size = fields.count("layer_group_size")
    whole = num_layers // size * size
    return [STATE if (index + 1) % size and index < whole else FULL for index in range(num_layers)]


def kimi_linear(fields: ConfigFields, num_layers: int) -> list[str]:
    """Read the lists of `linear_attn_config`, counted from 1.

    By default every fourth layer has attention (Kimi Linear).
    """
    nested = fields.get("linear_attn_config")
    if not isinstance(nested, Mapping) or not ("full_attn_layers" in nested and "kda_layers" in nested):
        return [FULL if index and index % 4 == 0 else STATE for index in range(num_layers)]
    full, states = list(nested["full_attn_layers"]), list(nested["kda_layers"])
    if sorted([*full, *states]) != list(range(1, num_layers + 1)):
        raise InvalidArgument(
            f"linear_attn_config lists {len(full)} full_attn_layers and {len(states)} kda_layers; together they must "
            f"be the numbers 1 to num_hidden_layers, {num_layers}"
        )
    return [FULL if index + 1 in full else STATE for index in range(num_layers)]


def all_ones(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return full attention for every layer; require that `attn_type_list` has 1 for each (MiniMax M2)."""
    listed = fields.items("attn_type_list")
    if listed is not None and any(value != 1 for value in exactly("attn_type_list", listed, num_layers)):
        raise InvalidArgument(f"attn_type_list is {shown(listed)}; all entries must be 1 for this model")
    return [FULL] * num_layers


def some_indexed(fields: ConfigFields, num_layers: int) -> list[str]:
    """Read `sparse_attention_config`, with 1 for a layer of sparse attention (MiniMax M3)."""
    nested = fields.get("sparse_attention_config")
    listed = nested.get("sparse_attention_freq") if isinstance(nested, Mapping) else None
    if listed is None or (isinstance(nested, Mapping) and nested.get("use_sparse_attention") is False):
        return [FULL] * num_layers
    if not isinstance(listed, (list, tuple)):
        raise InvalidArgument(f"sparse_attention_config.sparse_attention_freq is {shown(listed)}; it must be a list")
    listed = exactly("sparse_attention_config.sparse_attention_freq", list(listed), num_layers)
    return [INDEXED if value else FULL for value in listed]


def exactly(name: str, values: list[object], num_layers: int) -> list[object]:
    """Return `values` if there is one for each layer, else raise `InvalidArgument`."""
    if len(values) != num_layers:
        raise InvalidArgument(f"{name} has {len(values)} entries; num_hidden_layers is {num_layers}")
    return values
