"""The layers of a Hugging Face config: which keep keys and values, how many, and which keep a state."""

from __future__ import annotations

from collections.abc import Mapping

from ..arguments import require_int
from ..errors import InvalidArgument
from .fields import ConfigFields
from .layer_types import CHUNKED, CONVOLUTION, FULL, HYBRID, SLIDING, STATE, layer_kinds, num_listed_layers
from .layers import AttentionLayer, StateLayer, StatePart


def convolution_state(fields: ConfigFields, index: int) -> StateLayer:
    """LFM2's short convolution: the last tokens' hidden states, gated."""
    columns = fields.count("conv_L_cache") - 1
    return StateLayer(index, "convolution", (StatePart("convolution", fields.count("hidden_size"), columns),))


def recurrent_state(fields: ConfigFields, index: int) -> StateLayer:
    """The state of a linear-attention or Mamba layer, recognised by the fields that give its sizes.

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
        f"mamba_num_heads and mamba_d_state says how large (model_type is {fields.model_type!r}); it cannot be counted"
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


_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_HEAD_SIZE = ("head_dim", "attention_head_dim", "kv_channels", "d_kv")
#: Fields that change what a layer keeps in a way that is not counted here.
_UNKNOWN_FIELDS = {
    "is_encoder_decoder": "the decoder also keeps keys and values of the encoder",
    "cross_attention_layers": "these layers keep keys and values of another input",
    "index_topk": "sparse attention keeps an index of its own beside the latent vector",
    "use_cla": "layers share keys and values in a pattern",
    "block_configs": "layers differ in their attention",
    "num_key_value_heads_per_layer": "layers differ in their attention",
    "attn_type_list": "the sizes of its linear attention are not in the config",
    "linear_attn_config": "the state of its linear attention is not known here",
    "swa_num_key_value_heads": "sliding layers have sizes of their own",
    "swa_head_dim": "sliding layers have sizes of their own",
    "use_bidirectional_attention": "a bidirectional model keeps nothing from step to step",
}
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
    """The layers that keep keys and values, and those that keep a state. O(layers).

    Raises `InvalidArgument` naming the field that is missing, out of range, or not understood.
    """
    _refuse_unknown(fields)
    num_layers = fields.count(*_NUM_LAYERS, default=num_listed_layers(fields))
    kinds = layer_kinds(fields, num_layers)
    num_own = num_layers - _num_shared(fields, num_layers)
    attention = [_attention_layer(fields, i, kinds[i]) for i in range(num_own) if kinds[i] in _WITH_KEYS]
    states = [_state_layer(fields, i, kind) for i, kind in enumerate(kinds) if kind in _WITH_STATE]
    return tuple(attention), tuple(states)


def _refuse_unknown(fields: ConfigFields) -> None:
    for name, reason in _UNKNOWN_FIELDS.items():
        value = fields.get(name)
        if value is not None and value is not False and value != []:
            raise InvalidArgument(f"{name} is {value!r}; such a model cannot be counted: {reason}")
    reason = _UNKNOWN_MODELS.get(fields.model_type, "")
    if reason:
        raise InvalidArgument(f"model_type is {fields.model_type!r}; such a model cannot be counted: {reason}")


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
        return AttentionLayer(index, 1, latent, 0, window, is_latent=True)
    key_size = _head_size(fields, kind)
    value_size = fields.count("v_head_dim", default=key_size)
    return AttentionLayer(index, _num_kv_heads(fields, kind), key_size, value_size, window)


def _window(fields: ConfigFields, kind: str) -> int:
    if kind == SLIDING:
        return fields.count("sliding_window")
    # A token of a chunk attends to at most the chunk: a window of its size is the most that is kept.
    return fields.count("attention_chunk_size") if kind == CHUNKED else 0


def _num_kv_heads(fields: ConfigFields, kind: str) -> int:
    """KV heads; as many as query heads when the config does not say."""
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
