"""Model families with layers that keep a state."""

from __future__ import annotations

from typing import Any

from . import layer_rules as rules
from . import state_layers as states
from .family import UNVERIFIED, VLLM, gqa, latent, row

#: Fields of latent attention that only affect weights.
_LATENT_ONLY = "head_dim num_key_value_heads qk_nope_head_dim qk_head_dim v_head_dim"
_NET: dict[str, Any] = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "layer_types": None,
}
_NET_EVERY = {**_NET, "full_attention_interval": None}
_MAMBA: dict[str, Any] = {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4}
_MAMBA_2: dict[str, Any] = {
    "mamba_expand": 2,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
}
#: Fields of Mamba layers that only affect weights or kernels.
_MAMBA_ONLY = """
chunk_size conv_bias mamba_chunk_size mamba_conv_bias mamba_dt_init_floor mamba_dt_limit mamba_dt_max mamba_dt_min
mamba_dt_rank mamba_hidden_act mamba_norm_before_gate mamba_proj_bias mamba_rms_norm mamba_use_mlp ssm_in_multiplier
mamba_inner_layernorms ssm_multipliers ssm_out_multiplier time_step_rank use_conv_bias
"""

STATE_FAMILIES = (
    # ------------------------------------------------ states
    row("qwen3_next", gqa(48, 2048, 16, 2, 256, **_NET_EVERY), rules.attention_every(4), states.gated_delta_net),
    row("qwen3_5_text", gqa(32, 4096, 16, 4, 256, **_NET_EVERY), rules.attention_every(4), states.gated_delta_net),
    row("qwen3_5_moe_text", gqa(40, 2048, 16, 2, 256, **_NET_EVERY), rules.attention_every(4), states.gated_delta_net),
    row(
        "olmo_hybrid",
        gqa(32, 3840, 30, **dict.fromkeys(_NET) | {"linear_conv_kernel_dim": 4}),
        rules.attention_every_or_last(4),
        states.gated_delta_net,
        harmless="linear_allow_neg_eigval linear_a_log_min "
        "linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor",
    ),
    row(
        "kimi_linear",
        latent(
            27,
            2304,
            32,
            512,
            64,
            linear_attn_config=None,
            linear_num_heads=32,
            linear_head_dim=128,
            linear_conv_kernel_dim=4,
            layer_types=None,
        ),
        rules.kimi_linear,
        states.kimi_delta,
        harmless=_LATENT_ONLY + " mla_use_nope",
    ),
    row(
        "bamba",
        gqa(32, 4096, 32, 8, attn_layer_indices=None, layers_block_type=None, **_MAMBA_2),
        rules.attention_at("attn_layer_indices", rules.STATE),
        states.mamba2,
        harmless=_MAMBA_ONLY,
    ),
    row(
        "falcon_h1",
        gqa(32, 4096, 32, 8, mamba_d_ssm=1024, **_MAMBA_2),
        rules.all_hybrid,
        states.mamba2,
        harmless=_MAMBA_ONLY + " layers_block_type layer_types",
    ),
    row(
        "granitemoehybrid",
        gqa(32, 4096, 32, layer_types=None, layers_block_type=None, **_MAMBA_2),
        rules.require_list,
        states.mamba2,
        harmless=_MAMBA_ONLY,
    ),
    row(
        "nemotron_h",
        gqa(
            None,
            4096,
            32,
            8,
            128,
            layer_types=None,
            layers_block_type=None,
            hybrid_override_pattern=None,
            sliding_window=None,
            **{**_MAMBA_2, "mamba_d_state": 128, "mamba_d_head": 64, "mamba_n_groups": 8},
        ),
        rules.require_list,
        states.mamba2,
        harmless=_MAMBA_ONLY + " mtp_hybrid_override_pattern mtp_layers_block_type",
        aliases={
            "head_dim": "attention_head_dim",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_d_state": "ssm_state_size",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_expand": "expand",
        },
        fixed={"is_listed": True},
    ),
    row(
        "zamba2",
        gqa(
            54,
            2560,
            32,
            layers_block_type=None,
            **{**_MAMBA_2, "mamba_d_state": 64, "mamba_n_heads": 8, "mamba_d_head": None},
        ),
        rules.require_list,
        states.mamba2,
        aliases={
            "mamba_n_heads": "n_mamba_heads",
            "mamba_n_groups": "mamba_ngroups",
            "mamba_d_state": "state_size",
            "layers_block_type": "layer_types",
        },
        fixed={"hidden_sizes_per_head": 2},
        harmless=_MAMBA_ONLY + " attention_head_dim attention_hidden_size kv_channels num_query_groups adapter_rank "
        "hybrid_layer_ids mamba_headdim num_mem_blocks use_mem_eff_path use_mem_rope use_shared_attention_adapter "
        "use_shared_attention_lora use_shared_block ft_lora gated_linear_unit lora_rank "
        "use_shared_mlp_adapter add_bias_linear head_dim",
    ),
    row(
        "jamba",
        gqa(32, 4096, 32, 8, attn_layer_period=8, attn_layer_offset=4, **_MAMBA),
        rules.attention_by_period,
        states.mamba,
        harmless=_MAMBA_ONLY + " expert_layer_period expert_layer_offset",
    ),
    row(
        "lfm2",
        gqa(32, 2560, 32, 8, layer_types=None, full_attn_idxs=None, conv_L_cache=3),
        rules.attention_at("full_attn_idxs", rules.CONVOLUTION),
        harmless="conv_bias conv_dim conv_dim_out "
        "conv_use_xavier_init block_auto_adjust_ff_dim block_dim block_ff_dim block_ffn_dim_multiplier "
        "block_mlp_init_scale block_multiple_of block_norm_eps block_out_init_scale block_use_swiglu "
        "block_use_xavier_init num_heads",
    ),
    row(
        "lfm2_moe",
        gqa(32, 2048, 32, 8, layer_types=None, full_attn_idxs=None, conv_L_cache=3),
        rules.attention_at("full_attn_idxs", rules.CONVOLUTION),
        harmless="conv_bias",
    ),
    row(
        "minimax",
        gqa(32, 4096, 32, 8, sliding_window=None, layer_types=None),
        rules.alternating_states,
        states.lightning,
        harmless="block_size full_attn_alpha_factor full_attn_beta_factor linear_attn_alpha_factor "
        "linear_attn_beta_factor",
    ),
    row(
        "minimax_text_01 minimax_m1",
        gqa(80, 6144, 64, 8, 128, attn_type_list=None),
        rules.alternating_states,
        states.lightning,
        source=UNVERIFIED,
        harmless="layernorm_full_attention_alpha",
    ),
    row(
        "bailing_moe_linear bailing_moe_linear_v2",
        gqa(20, 2048, 16, 4, 128, layer_group_size=5, num_kv_heads_for_linear_attn=0),
        rules.grouped,
        states.ring_linear,
        source=UNVERIFIED,
        harmless="group_norm_size linear_silu max_window_layers",
    ),
    row(
        "bailing_hybrid bailing_moe_v3 bailing_moe_v2_5",
        latent(
            20,
            2048,
            16,
            512,
            64,
            head_dim=128,
            layer_group_size=4,
            short_conv_kernel_size=None,
            kda_safe_gate=None,
            kda_lower_bound=None,
            no_kda_lora=None,
            group_norm_size=None,
            num_kv_heads_for_linear_attn=0,
        ),
        rules.grouped,
        states.bailing,
        source=VLLM,
        harmless="use_mla_nope linear_silu max_window_layers "
        "num_key_value_heads qk_head_dim qk_nope_head_dim v_head_dim gated_attention_proj_granularity_type",
    ),
    # ------------------------------------------------ only states
    row(
        "mamba falcon_mamba",
        {"num_hidden_layers": 32, "hidden_size": 768, "mamba_channels": None, **_MAMBA},
        rules.all_states,
        states.mamba,
        aliases={
            "mamba_channels": "intermediate_size",
            "mamba_expand": "expand",
            "mamba_d_state": "state_size",
            "mamba_d_conv": "conv_kernel",
        },
        harmless=_MAMBA_ONLY + " d_model n_layer d_inner",
    ),
    row(
        "mamba2",
        {
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            **_MAMBA_2,
            "mamba_d_state": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
        },
        rules.all_states,
        states.mamba2,
        aliases={
            "mamba_expand": "expand",
            "mamba_d_state": "state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_n_heads": "num_heads",
            "mamba_d_head": "head_dim",
            "mamba_n_groups": "n_groups",
        },
        harmless=_MAMBA_ONLY,
    ),
    row(
        "xlstm",
        {"num_hidden_layers": 32, "hidden_size": 4096, "num_heads": 8, "qk_dim_factor": 0.5, "v_dim_factor": 1.0},
        rules.all_states,
        states.mlstm,
        aliases={"num_hidden_layers": "num_blocks", "hidden_size": "embedding_dim"},
        harmless="autocast_kernel_dtype chunk_size chunkwise_kernel "
        "inference_state_dtype max_inference_chunksize return_last_states sequence_kernel step_kernel",
    ),
)
