"""Small models with random weights whose layers keep states, one of each architecture, and what checks their tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from blockyard_engine import Engine

from .tiny_models import VOCAB_SIZE

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Wide weights make peaked logits, so that rounding never decides between two tokens.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
#: Transformers limits the time steps of chunks, and not of single tokens.
_UNLIMITED = {"time_step_min": 1e-9, "time_step_floor": 1e-9}
_LINEAR, _FULL = "linear_attention", "full_attention"
#: name: (config class, options)
HYBRIDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {
            **_DELTA,
            **_MIXTURE,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
        },
    ),
    "falcon_h1": (transformers.FalconH1Config, {**_MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 64}),
    "bamba": (transformers.BambaConfig, {**_MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        transformers.GraniteMoeHybridConfig,
        {
            **_MAMBA2,
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "layer_types": [_LINEAR, _FULL, _LINEAR],
        },
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {"num_hidden_layers": 4, "layer_types": ["conv", "conv", _FULL, "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "jamba": (
        transformers.JambaConfig,
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        {
            "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            **_UNLIMITED,
        },
    ),
    "zamba2": (
        transformers.Zamba2Config,
        {
            "num_hidden_layers": 5,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
            "num_key_value_heads": 4,
            "attention_head_dim": 16,
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 2,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "pad_token_id": 0,
            **_UNLIMITED,
        },
    ),
    "qwen3_5": (
        transformers.Qwen3_5TextConfig,
        {**_DELTA, "num_hidden_layers": 4, "head_dim": 16, "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
    ),
    "kimi_linear": (
        transformers.KimiLinearConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "olmo_hybrid": (
        transformers.OlmoHybridConfig,
        {
            **_DELTA,
            "linear_num_key_heads": 4,
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
        },
    ),
}


def hybrid_model(name: str, **changes: Any) -> Any:
    """A causal language model of an architecture in `HYBRIDS`, the same on every call."""
    config_class, options = HYBRIDS[name]
    torch.manual_seed(11)
    config = config_class(**{**_COMMON, **options, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def poisoned(engine: Engine) -> Engine:
    """The engine, with numbers in its memory that show in every logit which comes to see them."""
    runner: Any = engine._runner
    with torch.inference_mode():
        runner.slots._rows.fill_(0xFF)  # NaN in every dtype
        engine.kv_cache.data[:, 1:] = torch.nan
    return engine
