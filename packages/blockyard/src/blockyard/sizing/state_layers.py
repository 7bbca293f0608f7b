"""Sizes of the states of linear attention, Mamba and other recurrent layers.

Each function reads the fields of its kind and returns the state of one layer. A convolution over k tokens keeps the
k - 1 before the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..arguments import shown
from ..errors import InvalidArgument
from .config_fields import ConfigFields
from .field_names import can_change_cache, is_off
from .layers import StateLayer, StatePart

#: Keys of Kimi Linear's `linear_attn_config`.
_KIMI_KEYS = ("full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size")
#: A function from a config's fields and a layer's index to its state.
StateReader = Callable[[ConfigFields, int], StateLayer]


def convolution(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of LFM2's short convolution: the hidden states of the last tokens."""
    columns = fields.count("conv_L_cache") - 1
    return StateLayer(index, "convolution", (StatePart("convolution", fields.count("hidden_size"), columns),))


def gated_delta_net(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of Gated DeltaNet (arXiv 2412.06464; Qwen3-Next)."""
    columns = fields.count("linear_conv_kernel_dim") - 1
    heads = fields.count("num_attention_heads")
    key_heads = fields.count("linear_num_key_heads", default=heads)
    value_heads = fields.count("linear_num_value_heads", default=heads)
    # OLMo Hybrid's defaults: keys of three quarters of a head, values of twice a key.
    key_size = fields.count("linear_key_head_dim", default=3 * fields.count("hidden_size") // (4 * key_heads))
    value_size = fields.count("linear_value_head_dim", default=2 * key_size)
    parts = (
        StatePart("convolution of queries and keys", key_heads, 2 * key_size * columns),
        StatePart("convolution of values", value_heads, value_size * columns),
        StatePart("recurrent state", value_heads, key_size * value_size, is_recurrent=True),
    )
    return StateLayer(index, "gated delta net", parts)


def kimi_delta(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of Kimi Delta Attention (arXiv 2510.26692; Kimi Linear, Ling 3), with equal head sizes."""
    nested = fields.get("linear_attn_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise InvalidArgument(f"linear_attn_config is {shown(nested)}; it must be an object")
    sizes = nested or {}
    for name, value in sizes.items():
        if name not in _KIMI_KEYS and can_change_cache(str(name)) and not is_off(value):
            raise InvalidArgument(f"linear_attn_config.{name} is {shown(value)}; this key is unknown")
    heads = ConfigFields(sizes).count("num_heads", default=fields.count("linear_num_heads", "num_attention_heads"))
    size = ConfigFields(sizes).count("head_dim", default=fields.count("linear_head_dim", "head_dim"))
    kernel = fields.count("linear_conv_kernel_dim", "short_conv_kernel_size")
    columns = ConfigFields(sizes).count("short_conv_kernel_size", default=kernel) - 1
    parts = (
        StatePart("convolutions", heads, 3 * size * columns),
        StatePart("recurrent state", heads, size * size, is_recurrent=True),
    )
    return StateLayer(index, "kimi delta", parts)


def lightning(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of lightning attention (arXiv 2401.04658; MiniMax-Text-01): a square matrix per query head."""
    heads = fields.count("num_attention_heads")
    size = fields.count("head_dim", default=fields.count("hidden_size") // heads)
    part = StatePart("recurrent state", heads, size * size, is_recurrent=True)
    return StateLayer(index, "lightning attention", (part,))


def bailing(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of Kimi Delta Attention (Ling 3) or lightning attention (Ring 2.5), depending on the fields."""
    _require_full_heads(fields)
    names = ("short_conv_kernel_size", "no_kda_lora", "kda_safe_gate", "kda_lower_bound")
    if any(fields.get(name) is not None for name in names):
        return kimi_delta(fields, index)
    if fields.get("group_norm_size") is not None:
        return lightning(fields, index)
    raise InvalidArgument(
        "short_conv_kernel_size and group_norm_size are missing; one of them must show whether the states are those of "
        "Ling 3 or of Ring 2.5"
    )


def ring_linear(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of Ring-linear's lightning attention, after checking that keys have all heads."""
    _require_full_heads(fields)
    return lightning(fields, index)


def _require_full_heads(fields: ConfigFields) -> None:
    heads, given = fields.count("num_attention_heads"), fields.count("num_kv_heads_for_linear_attn", low=0, default=0)
    if given not in (0, heads):
        raise InvalidArgument(
            f"num_kv_heads_for_linear_attn is {given}; it must be 0 or num_attention_heads, {heads}: states with fewer "
            f"KV heads are not supported"
        )


def mamba(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of Mamba (arXiv 2312.00752; Jamba)."""
    channels = fields.count("mamba_channels", default=fields.count("mamba_expand") * fields.count("hidden_size"))
    parts = (
        StatePart("convolution of inputs", channels, fields.count("mamba_d_conv") - 1),
        StatePart("recurrent state", channels, fields.count("mamba_d_state"), is_recurrent=True),
    )
    return StateLayer(index, "mamba", parts)


def mamba2(fields: ConfigFields, index: int) -> StateLayer:
    """Return the state of Mamba-2 (arXiv 2405.21060; Bamba, Granite 4, Nemotron-H, Falcon-H1)."""
    heads = fields.count("mamba_n_heads")
    head_size, state_size = _mamba2_head_size(fields, heads), fields.count("mamba_d_state")
    groups, columns = fields.count("mamba_n_groups"), fields.count("mamba_d_conv") - 1
    parts = (
        StatePart("convolution of inputs", heads, head_size * columns),
        StatePart("convolution of B and C", groups, 2 * state_size * columns),
        StatePart("recurrent state", heads, head_size * state_size, is_recurrent=True),
    )
    return StateLayer(index, "mamba2", parts)


def _mamba2_head_size(fields: ConfigFields, heads: int) -> int:
    if fields.get("mamba_d_head") not in (None, "auto"):
        return fields.count("mamba_d_head")
    channels = fields.count("mamba_d_ssm", default=fields.count("mamba_expand") * fields.count("hidden_size"))
    if channels % heads:
        raise InvalidArgument(f"mamba_n_heads is {heads}; it must divide mamba_expand * hidden_size, {channels}")
    return channels // heads


def mlstm(fields: ConfigFields, index: int) -> StateLayer:
    """Return the matrix memory of xLSTM (arXiv 2405.04517): a matrix, a vector and a number per head."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_heads")
    key_size = _factored(fields, "qk_dim_factor", hidden) // heads
    value_size = _factored(fields, "v_dim_factor", hidden) // heads
    part = StatePart("matrix memory", heads, key_size * value_size + key_size + 1, is_recurrent=True)
    return StateLayer(index, "mlstm", (part,))


def _factored(fields: ConfigFields, name: str, hidden_size: int) -> int:
    """Return hidden_size times a fraction, rounded up to a multiple of 64 as in xLSTM."""
    factor = fields.get(name)
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 < factor <= 64:
        raise InvalidArgument(f"{name} is {factor!r}; it must be a number above 0, at most 64")
    return -int(-hidden_size * factor // 64) * 64
