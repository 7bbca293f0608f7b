"""Fields of published files that are no reason to refuse, and fields beside them that are."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import KVCacheSpec
from blockyard.sizing.field_names import can_change_cache

BF16 = {"torch_dtype": "bfloat16"}


def plain(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {"model_type": model_type, **sizes, "num_key_value_heads": kv_heads, **BF16, **others}


GLM_5 = plain("glm_moe_dsa", 78, 6144, 64, 64, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128)
LONGCAT = {"model_type": "longcat_flash", "num_layers": 28, "hidden_size": 6144, "num_attention_heads": 64, **BF16}
MIMO = plain("mimo", 36, 4096, 32, 8, head_dim=128, sliding_window=32768, max_window_layers=36)
MPT = {"model_type": "mpt", "n_layers": 32, "d_model": 4096, "n_heads": 32, **BF16}
MPT_ATTENTION = {"alibi": True, "attn_impl": "torch", "attn_type": "multihead_attention", "qk_ln": False}
NEMOTRON_3 = plain("nemotron_h", 4, 4096, 32, 2, head_dim=128, hybrid_override_pattern="ME*E", mamba_num_heads=128)


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        # 78 layers of a latent vector, 576 * 2 bytes, and an index key, 128 * 2 bytes.
        ({**GLM_5, "indexer_rope_interleave": True, "moe_layer_freq": 1}, 78 * (1_152 + 256)),
        ({**GLM_5, "index_share_for_mtp_iteration": True}, 78 * (1_152 + 256)),
        ({**LONGCAT, "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}, 56 * 1_152),
        ({**NEMOTRON_3, "moe_latent_size": 1024, "mtp_layers_block_type": ["attention", "moe"]}, 2 * 2 * 128 * 2),
        ({**MIMO, "use_sliding_window": False}, 36 * 2 * 8 * 128 * 2),
        ({**MPT, "attn_config": MPT_ATTENTION}, 32 * 2 * 4096 * 2),
        (plain("gemma2", 42, 3584, 16, 8, head_dim=256, sliding_window=4096, sliding_window_size=4096),
         42 * 2 * 8 * 256 * 2),
        (plain("bailing_moe", 28, 2048, 16, 4, sliding_window=4096, use_sliding_window=False, norm_head=True),
         28 * 2 * 4 * 128 * 2),
        (plain("hunyuan_v1_moe", 32, 4096, 32, 8, class_num=2, moe_layer_num_skipped=1, skip_cls_token=True),
         32 * 2 * 8 * 128 * 2),
        (plain("smollm3", 36, 2048, 16, 4, max_window_layers=28, use_sliding_window=False), 36 * 2 * 4 * 128 * 2),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48, "pad_key_length": True, **BF16},
         40 * 2 * 128 * 2),
        (plain("arctic", 35, 7168, 56, 8, parallel_attn_mlp_res=True), 35 * 2 * 8 * 128 * 2),
        (plain("molmo", 28, 3584, 28, 4, attention_layer_norm=True), 28 * 2 * 4 * 128 * 2),
        (plain("phi3_v", 32, 3072, 32, 32, embd_layer={"a": 1}, img_processor={"b": 1}), 32 * 2 * 3072 * 2),
        (plain("minicpmv", 28, 3584, 28, 4, query_num=64, patch_size=14, slice_mode=True), 28 * 2 * 4 * 128 * 2),
        ({"model_type": "step3_vl", **BF16,
          "text_config": {"model_type": "step3_text", "num_hidden_layers": 61, "hidden_size": 7168, "head_dim": 256,
                          "num_attention_heads": 64, "num_attention_groups": 1, "share_q_dim": 2048}},
         61 * 2 * 256 * 2),
    ],
)  # fmt: skip
def test_harmless_published_fields_are_accepted(config: dict[str, Any], token_bytes: int) -> None:
    assert KVCacheSpec.from_config(config).bytes_per_token == token_bytes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MPT, "attn_config": {**MPT_ATTENTION, "attn_type": "multiquery_attention"}},
         "attn_config.attn_type is 'multiquery_attention'"),
        ({**MPT, "attn_config": {**MPT_ATTENTION, "sliding_window_size": 128}}, "attn_config.sliding_window_size is"),
        ({**LONGCAT, "attention_method": "MHA"}, "attention_method is 'MHA'; it must be 'MLA'"),
        (plain("bailing_moe", 28, 2048, 16, 4, use_sliding_window=True), "use_sliding_window is true"),
        (plain("gemma2", 42, 3584, 16, 8, sliding_window=4096, sliding_window_size=2048), "they must be equal"),
        (plain("kimi_linear", 4, 2304, 32, 32, linear_attn_config={"num_heads": 32, "num_kv_heads": 4}),
         "linear_attn_config.num_kv_heads is 4"),
        (plain("kimi_linear", 4, 2304, 32, 32, linear_attn_config=[1]), "linear_attn_config is "),
        (plain("llama", 32, 4096, 32, 8, _sliding_window=[None, 32768]), "_sliding_window is"),
        ({"dim": 4096, "n_layers": 36, "head_dim": 128, "n_heads": 32, "n_kv_heads": 8,
          "_sliding_window": [None, 32768, 32768, 32768], **BF16}, "_sliding_window is"),
    ],
)  # fmt: skip
def test_fields_beside_them_that_can_change_the_cache_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVCacheSpec.from_config(config)


@pytest.mark.parametrize(
    "name", ["_name_or_path", "_attn_implementation_autoset", "_from_model_config", "_commit_hash"]
)
def test_private_fields_of_transformers_are_harmless(name: str) -> None:
    assert not can_change_cache(name)


@pytest.mark.parametrize("value", [[], False, 3, "x"])
def test_a_text_config_that_is_no_object_is_refused_by_its_name(value: object) -> None:
    with pytest.raises(InvalidArgument, match="llm_config is"):
        KVCacheSpec.from_config({"model_type": "internvl_chat", "llm_config": value, **BF16})


def test_the_outermost_dtype_counts() -> None:
    """transformers and vLLM load a file in the type that the outermost config names, whatever is inside."""
    sizes = {"num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1}
    text = {"model_type": "gemma", **sizes, "torch_dtype": "float32"}
    config = {"model_type": "paligemma", "text_config": text, "torch_dtype": "bfloat16"}
    assert KVCacheSpec.from_config(config).bytes_per_token == 18 * 2 * 256 * 2
    omni = plain("qwen2_5_omni_text", 28, 3584, 28, 4)
    del omni["torch_dtype"]
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": omni, "torch_dtype": "bfloat16"}
    assert KVCacheSpec.from_config({"model_type": "qwen2_5_omni", "thinker_config": thinker}).dtype == "bfloat16"
