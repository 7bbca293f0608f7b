"""Every causal language model of transformers that can be made small, with random weights."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from blockyard_engine.checks.trial import small_config, small_model

ARCHITECTURES: list[str] = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = 13
#: Those that the engine serves.
_SERVED = """
afmoe apertus arcee aria_text axk1 axk2 bert bert-generation biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm
deepseek_v2 deepseek_v3 deepseek_v32 dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu
gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm
glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax jais2
jetmoe laguna llama longcat_flash mellum minicpm3 minimax_m2 ministral ministral3 mistral mixtral
modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe
qwen2 qwen2_moe qwen3 qwen3_moe roc_bert seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe
qwen3_5_moe_text qwen3_5_text qwen3_next zamba2 zaya
"""
SERVED = frozenset(_SERVED.split())
#: What the default config of an architecture lacks, or needs to be one that generates.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2, "n_routed_experts": 4, "head_dim": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_n_heads": 8},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 8},
}
#: Architectures whose small copies are large all the same, or take long to make.
_LARGE = {"blt": "its hash embeddings have 200 million weights", "xlm": "100 million weights"}


def small_architecture(name: str) -> Any:
    """Return a small random model of an architecture; skip the test if none can be made."""
    if name in _LARGE:
        pytest.skip(f"{name}: {_LARGE[name]}")
    try:
        config, model_class = _config_and_class(name)
        return small_model(model_class, config)
    except Exception as error:  # what a class raises that cannot be made from its own small config
        if name in SERVED:
            raise
        pytest.skip(f"{name} cannot be made small: {type(error).__name__}: {error}")


def _config_and_class(name: str) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[name](**_DEFAULTS.get(name, {}))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class.config_class is not type(config):
        config = config.get_text_config(decoder=True)
    config = small_config(config)
    for field, value in _windows(config).items():
        setattr(config, field, value)
    return config, model_class


def _windows(config: Any) -> dict[str, Any]:
    """Set a sliding window wherever a model can have one, and no end token."""
    changes: dict[str, Any] = {"eos_token_id": None}
    if getattr(config, "is_decoder", None) is False:
        changes["is_decoder"] = True
    if hasattr(config, "sliding_window"):
        changes["sliding_window"] = WINDOW
    if hasattr(config, "use_sliding_window"):
        changes |= {"use_sliding_window": True, "max_window_layers": 1}
        if getattr(config, "layer_types", None):
            changes["layer_types"] = ["full_attention", *["sliding_attention"] * (config.num_hidden_layers - 1)]
    return changes
