"""Parameters counted from configs, beside what transformers builds from them; and models whose numbers are known."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import count_parameters, known_model, model_names

#: Small, odd sizes, so that no two parts are alike.
COMMON = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "vocab_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
    **EXPERTS,
}
ARCHITECTURES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("mistral", {"sliding_window": None}),
    ("granite", {"head_dim": None, "hidden_size": 60}),
    ("phi3", {"pad_token_id": 0, "head_dim": None, "hidden_size": 60}),
    ("qwen2", {"head_dim": None, "hidden_size": 60}),
    ("qwen3", {}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {"sliding_window": 16, "layer_types": ["full_attention"] * 3}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 20, **EXPERTS}),
    ("qwen3_moe", {"num_experts": 4, **EXPERTS}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 12}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 12, "n_group": 2, "topk_group": 1}),
]


@pytest.mark.parametrize(("kind", "others"), ARCHITECTURES, ids=lambda value: value if isinstance(value, str) else "")
def test_counts_are_those_of_transformers(kind: str, others: dict[str, Any]) -> None:
    """The model is built on the meta device: shapes and no numbers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {name: value for name, value in {**COMMON, **others}.items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **{**fields, "dtype": "bfloat16"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    # DeepSeek-V3 corrects its experts' balance by a buffer, which is in the files beside the parameters.
    built += sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert count_parameters(config) == built
    assert count_parameters({"model_type": kind, "dtype": "bfloat16", **config.to_dict()}) == built


def test_known_models_have_the_parameters_of_their_configs() -> None:
    counted = 0
    for name in model_names():
        model = known_model(name)
        assert model.num_parameters > 0
        if model.config["model_type"] in {kind for kind, _ in ARCHITECTURES}:
            assert count_parameters(model.config | {"torch_dtype": "bfloat16"}) == model.num_parameters
            counted += 1
    assert counted == 26
    assert len(model_names()) == 32


def test_experts_of_gpt_oss_are_padded_where_they_are_held() -> None:
    # 17 bytes for 32 parameters; one side of each of three matrices is 3,072 instead of 2,880.
    for name, experts in (("gpt-oss-20b", 24 * 32), ("gpt-oss-120b", 36 * 128)):
        model = known_model(name)
        assert model.served_bytes - model.weight_bytes == experts * 3 * 2880 * (3072 - 2880) * 17 // 32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "jamba"}, "model_type is 'jamba'; its parameters cannot be counted here. Known: deepseek_v2"),
        ({}, "model_type is ''; its parameters cannot be counted here"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias is True; parameters of such layers cannot be counted"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2; it must be 1"),
        ({"model_type": "llama", "vocab_size": None}, "vocab_size is missing"),
        ({"model_type": "llama", "vocab_size": 0}, "vocab_size is 0; it must be from 1"),
    ],
)
def test_what_cannot_be_counted_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        count_parameters({**COMMON, "torch_dtype": "bfloat16", **config})
