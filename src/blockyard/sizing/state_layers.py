"""States of layers without keys and values: linear attention, Mamba, short convolutions.

A causal convolution over k tokens keeps the k - 1 before the current one, as vLLM does; transformers keeps k.
"""

from __future__ import annotations

from ..errors import InvalidArgument
from .fields import ConfigFields
from .layers import StateLayer, StatePart


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
