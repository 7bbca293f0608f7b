"""Parameters counted from configs, beside what transformers builds from them; and models whose numbers are known."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import count_parameters, known_model, model_names, model_weights

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
INDEXED = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 2, "q_lora_rank": 12, "n_group": 2, "topk_group": 1}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SHARED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS}
GATED = {
    **EXPERTS,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 6,
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
    ("deepseek_v32", {**LATENT, **INDEXED, **SPARSE}),
    ("glm_moe_dsa", {**LATENT, **INDEXED, **SPARSE, "indexer_types": ["full"] * 3}),
    ("glm4_moe_lite", {**LATENT, **SPARSE, "q_lora_rank": 12}),
    ("glm4_moe", {**SHARED, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", {**SHARED, "use_qk_norm": False}),
    ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("ministral3", {}),
    ("smollm3", {"pad_token_id": 0, "head_dim": None, "hidden_size": 60, "no_rope_layers": [1, 1, 1]}),
    ("olmo2", {"pad_token_id": 0, "head_dim": None, "hidden_size": 60}),
    ("olmo3", {"pad_token_id": 0, "head_dim": None, "hidden_size": 60}),
    ("hunyuan_v1_dense", {}),
    ("exaone4", {"layer_types": ["full_attention"] * 3}),
    ("ernie4_5", {}),
    ("seed_oss", {}),
    ("qwen3_next", {"num_experts": 4, "shared_expert_intermediate_size": 20, "full_attention_interval": 2, **GATED}),
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
    # DeepSeek-V3 and others correct their experts' balance by a buffer, which is in the files beside the parameters.
    built += sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert count_parameters(config) == built
    assert count_parameters({"model_type": kind, "dtype": "bfloat16", **config.to_dict()}) == built


def test_known_models_have_the_parameters_of_their_configs() -> None:
    uncounted = []
    for name in model_names():
        model = known_model(name)
        try:
            assert count_parameters(model.config | {"torch_dtype": "bfloat16"}) == model.num_parameters
        except InvalidArgument:
            uncounted.append(name)
    assert uncounted == ["bamba-9b", "falcon-40b", "falcon-7b", "jamba-v0.1"]
    assert len(model_names()) == 60


def test_experts_of_gpt_oss_are_padded_where_they_are_held() -> None:
    # 17 bytes for 32 parameters; one side of each of three matrices is 3,072 instead of 2,880.
    for name, experts in (("gpt-oss-20b", 24 * 32), ("gpt-oss-120b", 36 * 128)):
        found = model_weights(known_model(name).config)
        assert found.rank_bytes - found.file_bytes == experts * 3 * 2880 * (3072 - 2880) * 17 // 32
    # On eight ranks, 360 of an expert's 2,880 columns are padded to 512.
    eighth = model_weights(known_model("gpt-oss-20b").config, tensor_parallel_size=8)
    assert eighth.rank_bytes > 1.3 * model_weights(known_model("gpt-oss-20b").config).file_bytes / 8


TEXT = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
TEXT |= {"intermediate_size": 56, "vocab_size": 101}
QWEN_IMAGES = {"depth": 9, "hidden_size": 32, "intermediate_size": 44, "num_heads": 4, "out_hidden_size": 48}
GEMMA_4 = {"global_head_dim": 20, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 101}
GEMMA_4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
GEMMA_4_IMAGES = {"model_type": "gemma4_vision", "num_hidden_layers": 2}
MULTIMODAL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("qwen3_5", {"model_type": "qwen3_5_text", "num_hidden_layers": 4, **GATED}, QWEN_IMAGES),
    ("qwen3_5_moe", {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 4, "num_experts": 4, **GATED}, QWEN_IMAGES),
    ("qwen3_vl", {}, {**QWEN_IMAGES, "deepstack_visual_indexes": [1, 3]}),
    ("qwen2_5_vl", {"head_dim": None, "hidden_size": 60}, {"depth": 1}),
    ("gemma3", {}, {"num_hidden_layers": 2, "vision_use_head": False}),
    ("gemma4", {"model_type": "gemma4_text", "num_kv_shared_layers": 1, "use_double_wide_mlp": True, **GEMMA_4},
     GEMMA_4_IMAGES),
    ("gemma4", {"model_type": "gemma4_text", "num_kv_shared_layers": 0, "attention_k_eq_v": True, **GEMMA_4,
                "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                "moe_intermediate_size": 24, "hidden_size_per_layer_input": 0}, GEMMA_4_IMAGES),
    ("llama4", {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64},
     {"num_hidden_layers": 2}),
    ("mistral3", {"model_type": "mistral"}, {"model_type": "pixtral", "num_hidden_layers": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "images"), MULTIMODAL, ids=lambda v: v if isinstance(v, str) else "")
def test_counts_with_encoders_are_those_of_transformers(
    kind: str, text: dict[str, Any], images: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, text_config={**TEXT, **text}, vision_config=images, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    built = sum(parameter.numel() for parameter in model.parameters())
    built += sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("layer_scalar"))
    found = model_weights({**config.to_dict(), "dtype": "bfloat16"})
    if kind == "qwen2_5_vl":  # its encoder is not counted, and the plan says so
        built -= sum(parameter.numel() for name, parameter in model.named_parameters() if "visual" in name)
        assert (found.num_parameters, found.uncounted) == (built, ("vision_config",))
        return
    assert found.num_parameters + found.num_encoder_parameters == built
    assert found.uncounted == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "jamba"}, "model_type is 'jamba'; to count parameters it must be one of deepseek_v2"),
        ({}, "model_type is ''; to count parameters it must be one of"),
        (
            {"model_type": "llama", "mlp_bias": True},
            "mlp_bias is True; counting the parameters of such layers is not supported",
        ),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2; it must be 1"),
        ({"model_type": "llama", "vocab_size": None}, "vocab_size is missing"),
        ({"model_type": "llama", "vocab_size": 0}, "vocab_size is 0; it must be from 1"),
    ],
)
def test_uncountable_models_are_rejected_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        count_parameters({**COMMON, "torch_dtype": "bfloat16", **config})
