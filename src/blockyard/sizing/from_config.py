"""The layers of a Hugging Face config: which keep keys and values, how many, and which keep a state."""

from __future__ import annotations

from collections.abc import Mapping

from ..arguments import require_int, shown
from ..errors import InvalidArgument
from .fields import ConfigFields
from .layers import AttentionLayer, StateLayer, StatePart

FULL, SLIDING, CHUNKED = "full", "sliding", "chunked"
STATE, CONVOLUTION, HYBRID, NOTHING = "state", "convolution", "hybrid", "nothing"
#: The names that configs give to kinds of layers.
_KINDS = {
    "full_attention": FULL,
    "attention": FULL,
    "indexed_attention": FULL,
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
    """Return the kind of each layer, `num_layers` of them.

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
    """Return layers of the first list of layer types that there is; None without one."""
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
                f"{name}[{index}] is {shown(value)}; what such a layer keeps is unknown. Known: {', '.join(_KINDS)}"
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
        f"sliding_window is {shown(fields.get('sliding_window'))}, and neither layer_types nor sliding_window_pattern "
        f"says in which layers (model_type is {shown(fields.model_type)}); add layer_types, or set sliding_window to "
        f"None"
    )


def _pattern(fields: ConfigFields) -> int | str:
    """Return every how many layers one is full, a string of L (local) and G (global), or 0 if nothing says it."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    value = fields.get(*names)
    if isinstance(value, str):
        if not value or set(value) - {"L", "G"}:
            raise InvalidArgument(f"sliding_window_pattern is {shown(value)}; it must be a number, or letters L and G")
        return value
    return fields.count(*names, default=_PATTERN_DEFAULTS.get(fields.model_type, 0))


def _every(interval: int, last: str, others: str, num_layers: int) -> list[str]:
    """Put `last` in every `interval`-th layer, `others` before it."""
    return [others if (index + 1) % interval else last for index in range(num_layers)]


def convolution_state(fields: ConfigFields, index: int) -> StateLayer:
    """LFM2's short convolution: the last tokens' hidden states, gated."""
    columns = fields.count("conv_L_cache") - 1
    return StateLayer(index, "convolution", (StatePart("convolution", fields.count("hidden_size"), columns),))


def recurrent_state(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of a linear-attention or Mamba layer, recognised by the fields that give its sizes.

    Gated DeltaNet (arXiv 2412.06464; Qwen3-Next), Mamba-2 (arXiv 2405.21060; Bamba, Granite 4, Nemotron-H, Falcon-H1),
    Mamba (arXiv 2312.00752; Jamba). Raises `InvalidArgument` for any other: its bytes cannot be known. O(1).
    """
    if fields.get("linear_num_value_heads") is not None:
        return _gated_delta_net(fields, index)
    if fields.get("mamba_n_heads", "mamba_num_heads") is not None:
        return _mamba2(fields, index)
    if fields.get("mamba_d_state") is not None:
        return _mamba(fields, index)
    raise InvalidArgument(
        f"layer {index} keeps a state (linear attention or Mamba), and none of linear_num_value_heads, mamba_n_heads, "
        f"mamba_num_heads and mamba_d_state says how large (model_type is {shown(fields.model_type)}); it cannot be "
        f"counted"
    )


def _gated_delta_net(fields: ConfigFields, index: int) -> StateLayer:
    columns = fields.count("linear_conv_kernel_dim") - 1
    key_heads, key_size = fields.count("linear_num_key_heads"), fields.count("linear_key_head_dim")
    value_heads, value_size = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
    parts = (
        StatePart("convolution of queries and keys", key_heads, 2 * key_size * columns),
        StatePart("convolution of values", value_heads, value_size * columns),
        StatePart("recurrent state", value_heads, key_size * value_size, is_recurrent=True),
    )
    return StateLayer(index, "gated delta net", parts)


def _mamba2(fields: ConfigFields, index: int) -> StateLayer:
    heads = fields.count("mamba_n_heads", "mamba_num_heads")
    head_size, state_size = _mamba2_head_size(fields, heads), fields.count("mamba_d_state", "ssm_state_size")
    groups = fields.count("mamba_n_groups", "n_groups")
    columns = fields.count("mamba_d_conv", "conv_kernel") - 1
    parts = (
        StatePart("convolution of inputs", heads, head_size * columns),
        StatePart("convolution of B and C", groups, 2 * state_size * columns),
        StatePart("recurrent state", heads, head_size * state_size, is_recurrent=True),
    )
    return StateLayer(index, "mamba2", parts)


def _mamba2_head_size(fields: ConfigFields, heads: int) -> int:
    given = fields.get("mamba_d_head", "mamba_head_dim")
    if given is not None and given != "auto":
        return fields.count("mamba_d_head", "mamba_head_dim")
    channels = fields.count("mamba_expand", "expand") * fields.count("hidden_size")
    if channels % heads:
        raise InvalidArgument(f"mamba_n_heads is {heads}; it must divide mamba_expand * hidden_size, {channels}")
    return channels // heads


def _mamba(fields: ConfigFields, index: int) -> StateLayer:
    channels = fields.count("mamba_expand") * fields.count("hidden_size")
    parts = (
        StatePart("convolution of inputs", channels, fields.count("mamba_d_conv") - 1),
        StatePart("recurrent state", channels, fields.count("mamba_d_state"), is_recurrent=True),
    )
    return StateLayer(index, "mamba", parts)


#: Ten times those of the deepest models; each is an object here.
_MAX_LAYERS = 4096
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZE = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
#: Fields that change what a layer keeps in a way that is not counted here.
_UNKNOWN_FIELDS = {
    "is_encoder_decoder": "the decoder also keeps keys and values of the encoder",
    "cross_attention_layers": "these layers keep keys and values of another input",
    "use_cla": "layers share keys and values in a pattern",
    "block_configs": "layers differ in their attention",
    "num_key_value_heads_per_layer": "layers differ in their attention",
    "attn_type_list": "the sizes of its linear attention are not in the config",
    "linear_attn_config": "the state of its linear attention is not known here",
    "swa_num_key_value_heads": "sliding layers have sizes of their own",
    "swa_head_dim": "sliding layers have sizes of their own",
    "use_bidirectional_attention": "a bidirectional model keeps nothing from step to step",
}
#: Models of sparse attention whose index keeps one key a token, and others by the field that says they select.
_INDEXED_MODELS = {"deepseek_v32", "glm_moe_dsa"}
_INDEX_FIELDS = ("index_topk", "index_topk_blocks")
#: Model types whose layers keep something else than their fields say.
_UNKNOWN_MODELS = {
    "longcat_flash": "each layer has two attentions",
    "recurrent_gemma": "its recurrent layers are not known here",
    "zamba": "its shared attention is not known here",
    "zamba2": "its shared attention is not known here",
}
#: Kinds with keys and values, and kinds with a state; a hybrid layer has both.
_WITH_KEYS = {FULL, SLIDING, CHUNKED, HYBRID}
_WITH_STATE = {STATE, CONVOLUTION, HYBRID}
#: What published config.json files of a model leave out, because it is the default of its class.
_OMITTED: dict[str, dict[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
}


def read_layers(fields: ConfigFields) -> tuple[tuple[AttentionLayer, ...], tuple[StateLayer, ...]]:
    """Return the layers that keep keys and values, and those that keep a state. O(layers).

    Raises `InvalidArgument` naming the field that is missing, out of range, or not understood.
    """
    _refuse_unknown(fields)
    num_layers = fields.count(*_NUM_LAYERS, default=num_listed_layers(fields), high=_MAX_LAYERS)
    kinds = layer_kinds(fields, num_layers)
    num_own = num_layers - _num_shared(fields, num_layers)
    attention = [_attention_layer(fields, i, kinds[i]) for i in range(num_own) if kinds[i] in _WITH_KEYS]
    states = [_state_layer(fields, i, kind) for i, kind in enumerate(kinds) if kind in _WITH_STATE]
    return tuple(attention), tuple(states)


def _refuse_unknown(fields: ConfigFields) -> None:
    for name, reason in _UNKNOWN_FIELDS.items():
        value = fields.get(name)
        if value is not None and value is not False and value != []:
            raise InvalidArgument(f"{name} is {shown(value)}; such a model cannot be counted: {reason}")
    for name in _INDEX_FIELDS:
        if fields.get(name) is not None and fields.model_type not in _INDEXED_MODELS:
            raise InvalidArgument(
                f"{name} is {shown(fields.get(name))}; such a model cannot be counted: what its sparse attention keeps "
                f"beside keys and values is known of {' and '.join(sorted(_INDEXED_MODELS))} alone"
            )
    reason = _UNKNOWN_MODELS.get(fields.model_type, "")
    if reason:
        raise InvalidArgument(f"model_type is {shown(fields.model_type)}; such a model cannot be counted: {reason}")


def _num_shared(fields: ConfigFields, num_layers: int) -> int:
    """The last layers of Gemma 3n and Gemma 4 read the keys and values of earlier ones and keep none."""
    return require_int(
        "num_kv_shared_layers", fields.count("num_kv_shared_layers", low=0, default=0), 0, num_layers - 1
    )


def _state_layer(fields: ConfigFields, index: int, kind: str) -> StateLayer:
    return convolution_state(fields, index) if kind == CONVOLUTION else recurrent_state(fields, index)


def _attention_layer(fields: ConfigFields, index: int, kind: str) -> AttentionLayer:
    fields = fields.of_layer(index)
    window = _window(fields, kind)
    if fields.get("kv_lora_rank") is not None:
        latent = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim", low=0)
        return AttentionLayer(index, 1, latent, 0, window, is_latent=True, index_size=_index_size(fields, index))
    key_size = _head_size(fields, kind)
    value_size = fields.count("v_head_dim", default=key_size)
    return AttentionLayer(index, _num_kv_heads(fields, kind), key_size, value_size, window)


def _index_size(fields: ConfigFields, index: int) -> int:
    """Return the elements of an index key; none in layers that take the selection of an earlier one (GLM 5)."""
    if fields.get("index_topk") is None:
        return 0
    kinds = fields.items("indexer_types")
    if kinds is None and fields.count("index_topk_freq", default=1) > 1:
        raise InvalidArgument(
            f"indexer_types is missing; index_topk_freq is {shown(fields.get('index_topk_freq'))}: some layers take "
            f"the selection of another, and nothing says which (transformers.AutoConfig fills it in)"
        )
    if kinds is not None and index < len(kinds) and kinds[index] == "shared":
        return 0
    return fields.count("index_head_dim")


def _window(fields: ConfigFields, kind: str) -> int:
    if kind == SLIDING:
        return fields.count("sliding_window")
    # A token of a chunk attends to at most the chunk: a window of its size is the most that is kept.
    return fields.count("attention_chunk_size") if kind == CHUNKED else 0


def _num_kv_heads(fields: ConfigFields, kind: str) -> int:
    """Count the KV heads; as many as query heads when the config does not say."""
    num_heads = fields.count(*_NUM_HEADS, default=_omitted(fields, "num_attention_heads"))
    if kind == FULL and fields.flag("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
        return fields.count("num_global_key_value_heads")
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):  # Falcon, GPTBigCode
        return 1
    if fields.flag("multi_query_attention"):  # ChatGLM
        return fields.count("multi_query_group_num")
    nested = fields.get("attn_config")  # DBRX, MPT
    if isinstance(nested, Mapping) and nested.get("kv_n_heads") is not None:
        return require_int("attn_config.kv_n_heads", nested["kv_n_heads"], 1, num_heads)
    num_kv_heads = fields.count(*_NUM_KV_HEADS, default=_omitted(fields, "num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise InvalidArgument(f"num_key_value_heads is {num_kv_heads}; it must divide num_attention_heads, {num_heads}")
    return num_kv_heads


def _head_size(fields: ConfigFields, kind: str) -> int:
    """Elements of a key; the hidden size shared out to the heads when the config does not say."""
    if kind == FULL and fields.get("global_head_dim") is not None:  # Gemma 4
        return fields.count("global_head_dim")
    given = fields.get(*_HEAD_SIZE)
    if given is not None or _omitted(fields, "head_dim") is not None:
        return fields.count(*_HEAD_SIZE, default=_omitted(fields, "head_dim"))
    hidden_size, num_heads = fields.count(*_HIDDEN_SIZE), fields.count(*_NUM_HEADS)
    if hidden_size % num_heads:
        raise InvalidArgument(
            f"head_dim is missing, and hidden_size, {hidden_size}, is no multiple of num_attention_heads, {num_heads}"
        )
    return hidden_size // num_heads


def _omitted(fields: ConfigFields, name: str) -> int | None:
    return _OMITTED.get(fields.model_type, {}).get(name)
