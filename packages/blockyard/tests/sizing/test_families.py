"""Configs of families whose caches do not follow from the usual fields, and fields that no family knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import AttentionLayer, KVCacheSpec, known_model, model_names
from blockyard.sizing.families import find_family, known_model_types
from blockyard.sizing.field_names import can_change_cache

BF16 = {"torch_dtype": "bfloat16"}
PLAIN = {"hidden_size": 4096, "num_hidden_layers": 20, "num_attention_heads": 32, "num_key_value_heads": 8}
STEP_3_5: dict[str, Any] = {
    **BF16,
    "model_type": "step3p5",
    "architectures": ["Step3p5ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12,  # 3 of them predict further tokens
    "num_nextn_predict_layers": 3,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 96,
        "num_attention_groups": 8,
        "head_dim": 128,
    },
    "use_head_wise_attn_gate": True,
    "moe_layers_enum": "3,4,5",
    "share_expert_dim": 1280,
}
LING_3: dict[str, Any] = {
    **BF16,
    "model_type": "bailing_hybrid",
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "layer_group_size": 5,
    "short_conv_kernel_size": 4,
    "num_kv_heads_for_linear_attn": 0,
    "max_window_layers": 20,
    "gated_attention_proj_granularity_type": "head_wise",
    "kda_safe_gate": True,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
RING_LINEAR: dict[str, Any] = {
    **BF16,
    "model_type": "bailing_moe_linear",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "layer_group_size": 8,
    "group_norm_size": 8,
    "num_experts": 256,
    "n_group": 8,
}
MIMO_V2: dict[str, Any] = {
    **BF16,
    "model_type": "mimo_v2_flash",
    "hidden_size": 4096,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 128,
}
MINIMAX_M3: dict[str, Any] = {
    "model_type": "minimax_m3_vl",
    **BF16,
    "text_config": {
        "model_type": "minimax_m3_vl_text",
        "hidden_size": 6144,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sparse_attention_config": {
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_block_size": 128,
            "sparse_disable_index_value": [0] * 3 + [1] * 57,
        },
    },
}
DEEPSEEK_V32: dict[str, Any] = {
    **BF16,
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM_5_2: dict[str, Any] = {
    **DEEPSEEK_V32,
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "layer_types": ["deepseek_sparse_attention"] * 78,
    "indexer_types": ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3,
}
DEEPSEEK_OCR: dict[str, Any] = {
    "model_type": "deepseek_vl_v2",
    **BF16,
    "language_config": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 1280,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "use_mla": False,
        "kv_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
    },
}
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4",
    **BF16,
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "use_bidirectional_attention": "vision",
        "num_kv_shared_layers": 0,
    },
}
MISTRAL_PARAMS = {"dim": 5120, "n_layers": 40, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 14336}


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        # 45 layers * 2 * 8 heads * 128 * 2 bytes.
        (STEP_3_5, 184_320),
        # 4 of 20 layers * (512 + 64) * 2 bytes.
        (LING_3, 4 * 1_152),
        # 4 of 32 layers * 2 * 4 heads * 128 * 2 bytes.
        (RING_LINEAR, 8_192),
        # 9 full layers * 4 heads and 39 sliding ones * 8 heads, * (192 + 128) * 2 bytes.
        (MIMO_V2, 222_720),
        ({**MIMO_V2, "swa_num_key_value_heads": 2, "swa_head_dim": 64, "swa_v_head_dim": 32}, 38_016),
        # 60 layers * 2 * 4 heads * 128 * 2 bytes, and 57 index keys of 128 * 2 bytes.
        (MINIMAX_M3, 137_472),
        # 12 layers * 2 * 10 heads * 128 * 2 bytes.
        (DEEPSEEK_OCR, 61_440),
        # 50 sliding layers * 16 heads * 256 and 10 full ones * 4 heads * 512, * 2 * 2 bytes.
        (GEMMA_4, 4 * (50 * 16 * 256 + 10 * 4 * 512)),
        # 78 layers * 576 * 2 bytes, and 21 index keys of 128 * 2 bytes.
        (GLM_5_2, 78 * 1_152 + 21 * 256),
        ({**BF16, "model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "num_attention_heads": 64,
          "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2 * 28 * 1_152),
    ],
)  # fmt: skip
def test_each_config_has_the_expected_bytes_per_token(config: dict[str, Any], token_bytes: int) -> None:
    assert KVCacheSpec.from_config(config).bytes_per_token == token_bytes


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        # 16 layers: convolutions of 3 * 16 * 128 channels over 3 tokens of 2 bytes, and 16 * 128 * 128 * 4 bytes.
        (LING_3, 16 * (6_144 * 3 * 2 + 16 * 128 * 128 * 4)),
        # 28 layers * 32 heads * 128 * 128 * 4 bytes.
        (RING_LINEAR, 28 * 32 * 128 * 128 * 4),
    ],
)
def test_each_config_has_the_expected_bytes_per_state(config: dict[str, Any], num_bytes: int) -> None:
    assert KVCacheSpec.from_config(config).state_bytes_per_sequence == num_bytes


def test_ring_2_5_and_ling_3_are_distinguished_by_their_fields() -> None:
    ring = {name: value for name, value in LING_3.items() if name not in ("short_conv_kernel_size", "kda_safe_gate")}
    assert KVCacheSpec.from_config({**ring, "group_norm_size": 8}).num_layers_by_kind == {
        "latent": 4,
        "lightning attention": 16,
    }
    with pytest.raises(InvalidArgument, match="short_conv_kernel_size and group_norm_size are missing"):
        KVCacheSpec.from_config(ring)


def test_layers_left_over_by_groups_have_attention() -> None:
    layers = KVCacheSpec.from_config({**LING_3, "num_hidden_layers": 23}).layers
    assert [layer.index for layer in layers] == [4, 9, 14, 19, 20, 21, 22]


def test_float8_of_sparse_attention_has_vllms_format() -> None:
    """656 bytes: 512 elements, 4 scales of 4 bytes, 64 rotary elements of 2 bytes. 132: an index key and its scale."""
    assert KVCacheSpec.from_config(DEEPSEEK_V32, dtype="fp8").bytes_per_token == 61 * (656 + 132)
    assert KVCacheSpec.from_config(GLM_5_2, dtype="fp8").bytes_per_token == 78 * 656 + 21 * 132
    assert KVCacheSpec.from_config(known_model("deepseek-v3").config, dtype="fp8").bytes_per_token == 61 * 576


def test_indexers_follow_from_the_rule_that_glm_5_has_for_them() -> None:
    ruled = {name: value for name, value in GLM_5_2.items() if name != "indexer_types"}
    ruled = {**ruled, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    assert KVCacheSpec.from_config(ruled) == KVCacheSpec.from_config(GLM_5_2)
    lettered = {**ruled, "index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"}
    assert KVCacheSpec.from_config(lettered) == KVCacheSpec.from_config(GLM_5_2)


def test_gpt_oss_without_a_dtype_uses_bfloat16() -> None:
    assert KVCacheSpec.from_config(known_model("gpt-oss-20b").config).bytes_per_token == 24 * 2 * 8 * 64 * 2


def test_minimax_m2_lists_attention_for_every_layer() -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 48, "hidden_size": 3072, "num_key_value_heads": 8}
    config = {"model_type": "minimax_m2", **sizes, "head_dim": 128, "attn_type_list": [1] * 4}
    assert KVCacheSpec.from_config(config, dtype="bfloat16").bytes_per_token == 4 * 2 * 8 * 128 * 2
    with pytest.raises(InvalidArgument, match=r"attn_type_list is \[1, 0, 1, 1\]"):
        KVCacheSpec.from_config({**config, "attn_type_list": [1, 0, 1, 1]}, dtype="bfloat16")


def test_mistrals_params_file_is_read_where_there_is_no_config(tmp_path: Path) -> None:
    # 40 layers * 2 * 8 heads * 128 * 2 bytes.
    assert KVCacheSpec.from_config(MISTRAL_PARAMS, dtype="bfloat16").bytes_per_token == 163_840
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL_PARAMS))
    assert KVCacheSpec.from_config(tmp_path, dtype="bfloat16").bytes_per_token == 163_840
    with pytest.raises(InvalidArgument, match="n_heads, 32"):
        KVCacheSpec.from_config({**MISTRAL_PARAMS, "n_kv_heads": 5}, dtype="bfloat16")


def test_a_field_that_a_file_leaves_out_has_the_default_of_its_class() -> None:
    config = known_model("deepseek-v3").config
    assert KVCacheSpec.from_config({n: v for n, v in config.items() if n != "qk_rope_head_dim"}).bytes_per_token == (
        KVCacheSpec.from_config(config).bytes_per_token
    )
    nested = {"model_type": "llava", **BF16, "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert KVCacheSpec.from_config(nested).bytes_per_token == 32 * 2 * 32 * 128 * 2
    mistral = {"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096, **BF16}
    assert KVCacheSpec.from_config(mistral).layers[1] == AttentionLayer(1, 8, 128, 128, sliding_window=4096)


def test_an_architecture_names_a_model_whose_type_is_not_known() -> None:
    config = {**known_model("deepseek-v3").config, "model_type": "own", "architectures": ["DeepseekV3ForCausalLM"]}
    assert KVCacheSpec.from_config(config) == KVCacheSpec.from_config(known_model("deepseek-v3").config)


# ---------------------------------------------------------------- refused, by the field's name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2", "hidden_size": 1536, "num_hidden_layers": 48, "num_heads": 48, "head_dim": 64},
         "model_type is 'mamba2'; its 48 layers keep a state of"),
        ({"model_type": "xlstm", "hidden_size": 4096, "num_hidden_layers": 32}, "model_type is 'xlstm'; its 32 layers"),
        ({"model_type": "rwkv7", "hidden_size": 768, "num_hidden_layers": 12}, "model_type is 'rwkv7'"),
        ({"model_type": "recurrent_gemma"}, "model_type is 'recurrent_gemma'"),
        ({"model_type": "own_vl", "text_config": {"model_type": "llama"}}, "model_type is 'own_vl'"),
        ({**LING_3, "layer_group_size": None}, "layer_group_size is missing"),
        ({**STEP_3_5, "attention_other_setting": {"attention_type": "linear"}},
         "attention_other_setting.attention_type is 'linear'"),
        ({**STEP_3_5, "attention_other_setting": {"attention_type": "sliding_attention", "share": 2}},
         "attention_other_setting.share is 2"),
        ({**STEP_3_5, "num_key_value_heads": 4}, "num_key_value_heads and num_attention_groups are 4 and 8"),
        ({**LING_3, "num_kv_heads_for_linear_attn": 4}, "num_kv_heads_for_linear_attn is 4; it must be 0 or"),
        ({**MIMO_V2, "hybrid_layer_pattern": [0] + [1] * 47}, "swa_num_key_value_heads is missing"),
        ({**DEEPSEEK_V32, "index_topk_freq": 4}, "index_topk_freq is 4; it may change the cache"),
        ({**GLM_5_2, "indexer_types": ["full"]}, "indexer_types has 1 entries; num_hidden_layers is 78"),
        ({**MISTRAL_PARAMS, "n_kv_groups": 2}, "n_kv_groups is 2"),
        ({"model_type": "longcat_flash", "num_layers": 28, "num_hidden_layers": 28, "hidden_size": 6144,
          "num_attention_heads": 64}, "num_hidden_layers is 28; it must be twice num_layers, 28"),
        ({"model_type": "bert", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8},
         "is_decoder is not true"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_rejected(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVCacheSpec.from_config(config, dtype="bfloat16")


@pytest.mark.parametrize("use", ["all", True])
def test_attention_in_both_directions_is_refused(use: object) -> None:
    text = {**GEMMA_4["text_config"], "use_bidirectional_attention": use}
    with pytest.raises(InvalidArgument, match="use_bidirectional_attention is"):
        KVCacheSpec.from_config({**GEMMA_4, "text_config": text})


@pytest.mark.parametrize(
    "name",
    [
        "num_attention_groups",
        "layer_group_size",
        "sparse_attention_config",
        "n_kv_heads",
        "cla_share_factor",
        "kv_stride",
        "use_yoco",
        "sliding_window_size",
        "ssm_cfg",
        "global_attn_layers",
        "num_memory_tokens",
        "loop_num",
        "compress_ratios",
        "attn_type_list",
        "attention_other_setting",
        "hybrid_layer_pattern",
        "head_size",
        "mixer_types",
    ],
)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "qwen3-next-80b"])
def test_unknown_fields_that_may_change_the_cache_are_rejected(name: str, model: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is 2; it may change the cache"):
        KVCacheSpec.from_config({**known_model(model).config, name: 2})


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_disabled_fields_are_ignored(value: object) -> None:
    config = known_model("llama-3.1-8b").config
    assert KVCacheSpec.from_config({**config, "kv_stride": value}) == KVCacheSpec.from_config(config)


def test_fields_of_weights_positions_and_experts_are_harmless() -> None:
    names = """
    architectures auto_map attention_bias attention_dropout bos_token_id hidden_act initializer_range rope_theta
    rope_scaling rope_parameters rms_norm_eps layer_norm_eps max_position_embeddings mlp_bias moe_intermediate_size
    n_shared_experts num_experts_per_tok shared_expert_intermediate_size pretraining_tp quantization_config
    tie_word_embeddings torch_dtype transformers_version use_cache vocab_size attn_logit_softcapping unsloth_version
    first_k_dense_replace moe_layer_freq mlp_layer_types num_nextn_predict_layers qk_layernorm embedding_multiplier
    """
    assert [name for name in names.split() if can_change_cache(name)] == []


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("deepseek_v3", "aux_loss_alpha ep_size moe_layer_freq n_group qk_nope_head_dim seq_aux v_head_dim"),
        ("glm4_moe", "first_k_dense_replace n_group num_nextn_predict_layers partial_rotary_factor use_qk_norm"),
        ("qwen3_5_text", "attn_output_gate mtp_num_hidden_layers mtp_use_dedicated_embeddings"),
        ("minimax_m2", "layernorm_full_attention_beta layernorm_linear_attention_beta mtp_transformer_layers "
         "num_mtp_modules qk_norm_type rotary_dim shared_moe_mode"),
        ("falcon_h1", "attention_in_multiplier key_multiplier lm_head_multiplier mamba_use_mlp mlp_expansion_factor "
         "ssm_in_multiplier"),
        ("jamba", "calc_logits_for_entire_prompt expert_layer_offset mamba_inner_layernorms num_logits_to_keep"),
        ("gemma3n_text", "altup_active_idx altup_num_inputs hidden_size_per_layer_input laurel_rank"),
        ("llama4_text", "attn_scale attn_temperature_tuning floor_scale interleave_moe_layer_step use_qk_norm"),
        ("phi3", "full_attn_mod interpolate_factor lm_head_bias original_max_position_embeddings"),
        ("cohere2", "order_of_interleaved_layers use_embedding_sharing use_gated_activation use_parallel_block"),
        ("kimi_linear", "mla_use_nope moe_renormalize num_expert_group num_shared_experts"),
        ("ernie4_5_moe", "compression_ratio moe_k moe_layer_start_index moe_layer_end_index moe_layer_interval"),
    ],
)  # fmt: skip
def test_harmless_fields_of_published_configs_are_ignored(model_type: str, names: str) -> None:
    config = {**PLAIN, "model_type": model_type, **BF16}
    assert KVCacheSpec.from_config({**config, **dict.fromkeys(names.split(), 7)}) == KVCacheSpec.from_config(config)


# ---------------------------------------------------------------- the table


def test_every_family_is_found_by_its_names() -> None:
    for name in known_model_types():
        family = find_family(name)
        assert family is not None
        assert name in family.model_types
        assert not family.harmless & set(family.reads), name
    assert find_family("LlamaForCausalLM") is find_family("llama")
    assert find_family("Qwen3MoeForCausalLM") is find_family("qwen3_moe")


# ---------------------------------------------------------------- how a spec prints


@pytest.mark.parametrize("name", model_names())
def test_a_spec_prints_on_a_screen(name: str) -> None:
    text = str(KVCacheSpec.from_config(known_model(name).config))
    assert len(text.splitlines()) <= 24
    assert len(text) < 800


def test_a_spec_prints_equal_layers_once() -> None:
    assert repr(KVCacheSpec.from_config(known_model("llama-3.1-8b").config)).splitlines() == [
        "KVCacheSpec(bytes_per_token=131072, bytes_per_block=2097152, block_size=16, dtype='bfloat16', "
        "model_dtype='bfloat16',",
        "    layers 0-31: full, 8 KV heads, key 128, value 128)",
    ]
    layers = tuple(AttentionLayer(index, index + 1, 4, 4) for index in range(100))
    assert str(KVCacheSpec(layers)).splitlines()[-1] == "    and 92 further kinds of layers)"
