"""Published models by name, with the config fields that determine their cache and weights.

Each config has these fields of the model's config.json on the Hugging Face hub; fields that the file omits because they
are defaults are omitted here too. Numbers of parameters are those of the text model: a head tied to the embedding
counts once, encoders and draft layers do not count. They were computed by `weights.count_parameters`, or by
transformers for architectures that it does not know.
"""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..arguments import require_str
from ..errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A published model.

    Attributes:
        name: its name.
        config: config for `KVCacheSpec.from_config`, `ModelShape.from_config` and `model_weights`.
        num_parameters: parameters of its text model.
    """

    name: str
    config: dict[str, Any]
    num_parameters: int


def known_model(name: str) -> KnownModel:
    """Return the model of this name, ignoring case, with a copy of its config. O(1).

    Raises `InvalidArgument` for an unknown name, with similar ones.
    """
    found = _BY_NAME.get(require_str("name", name).lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), _BY_NAME, n=4, cutoff=0.5)
        hint = f"similar names: {', '.join(close)}" if close else f"known names: {', '.join(model_names())}"
        raise InvalidArgument(f"model is {name!r}; it must be a model's folder, a config.json, or a known name; {hint}")
    return copy.deepcopy(found)


def model_names() -> list[str]:
    """Return the known names, sorted."""
    return sorted(_BY_NAME)


def model_config(model: str | PathLike[str]) -> object:
    """Return a config for `KVCacheSpec.from_config` from a folder, a config.json, or the name of a known model.

    Raises `InvalidArgument` if it is none of them.
    """
    path = Path(model)
    return path if path.exists() else known_model(str(model)).config


def _plain(kind: str, layers: int, hidden: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **others,
    }


def _widths(mlp: int, vocabulary: int) -> dict[str, Any]:
    return {"intermediate_size": mlp, "vocab_size": vocabulary}


def _tied(mlp: int, vocabulary: int) -> dict[str, Any]:
    """Return the widths of a model whose config ties the head to the embedding."""
    return {**_widths(mlp, vocabulary), "tie_word_embeddings": True}


def _qwen_2_5(layers: int, hidden: int, heads: int, kv_heads: int, mlp: int) -> dict[str, Any]:
    window = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": layers}
    return _plain("qwen2", layers, hidden, heads, kv_heads, **window, **_widths(mlp, 152064))


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """Return a config without a type, because the files name none: the weights have several. The cache is bfloat16."""
    sizes = {"head_dim": 64, "sliding_window": 128, "num_local_experts": experts, "num_experts_per_tok": 4}
    config = _plain("gpt_oss", layers, 2880, 64, 8, **sizes, **_widths(2880, 201088), attention_bias=True)
    del config["torch_dtype"]
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    return {**config, "layer_types": kinds, "quantization_config": _MXFP4}


def _deepseek(kind: str, layers: int, hidden: int, heads: int = 128, **others: Any) -> dict[str, Any]:
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _plain(kind, layers, hidden, heads, heads, **sizes, q_lora_rank=1536, **others)


def _experts(mlp: int, vocabulary: int, size: int, count: int, per_token: int) -> dict[str, Any]:
    of_experts = {"moe_intermediate_size": size, "num_experts": count, "num_experts_per_tok": per_token}
    return {**_widths(mlp, vocabulary), **of_experts}


def _routed(
    mlp: int, vocabulary: int, size: int, count: int, per_token: int, shared: int, dense: int
) -> dict[str, Any]:
    """Return fields under DeepSeek's names: `shared` experts for every token, after `dense` layers without experts."""
    config = _experts(mlp, vocabulary, size, count, per_token)
    config["n_routed_experts"] = config.pop("num_experts")
    return {**config, "n_shared_experts": shared, "first_k_dense_replace": dense}


def _qwen_3_5(
    layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, *, image_layers: int = 27, **others: Any
) -> dict[str, Any]:
    """Return a config with an image encoder; `others` are widths or experts."""
    is_mixture = "num_experts" in others
    kind = "qwen3_5_moe" if is_mixture else "qwen3_5"
    text = _plain(f"{kind}_text", layers, hidden, heads, kv_heads, head_dim=256, **_GATED, **others)
    text |= {"linear_num_value_heads": value_heads, "mtp_num_hidden_layers": 1}
    is_tied = text.pop("tie_word_embeddings", False)
    image = {"model_type": kind, "depth": image_layers, "out_hidden_size": hidden, **_QWEN_IMAGES}
    return {"model_type": kind, "text_config": text, "vision_config": image, "tie_word_embeddings": is_tied}


def _gemma_4(layers: int, hidden: int, heads: int, kv_heads: int, period: int = 6, **others: Any) -> dict[str, Any]:
    """Return a config whose full layers are every `period`-th one and the last one."""
    kinds = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(layers)]
    text = _plain("gemma4_text", layers, hidden, heads, kv_heads, head_dim=256, global_head_dim=512, **others)
    text |= {"layer_types": [*kinds[:-1], "full_attention"], "vocab_size": 262144}
    return {"model_type": "gemma4", "text_config": text, "vision_config": _GEMMA_4_IMAGES}


def _gemma_4_small(layers: int, hidden: int, kv_heads: int, mlp: int, shared: int, period: int) -> dict[str, Any]:
    """Return a config with per-layer embeddings. The last `shared` layers keep no KV; E2B's have twice the MLP."""
    sizes = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, "sliding_window": 512}
    sizes |= {"num_kv_shared_layers": shared, "use_double_wide_mlp": period == 5, "intermediate_size": mlp}
    config = _gemma_4(layers, hidden, 8, kv_heads, period, **sizes)
    return {**config, "vision_config": _GEMMA_4_SMALL_IMAGES, "audio_config": {"model_type": "gemma4_audio"}}


def _glm_4_5(layers: int, hidden: int, has_norms: bool, **others: Any) -> dict[str, Any]:
    flags = {"attention_bias": True, "use_qk_norm": has_norms, "num_nextn_predict_layers": 1}
    return _plain("glm4_moe", layers, hidden, 96, 8, head_dim=128, **flags, **others)


def _llama_4(experts: int, every: int) -> dict[str, Any]:
    sizes = {"head_dim": 128, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": every}
    sizes |= {"num_local_experts": experts, "num_experts_per_tok": 1, "attention_chunk_size": 8192}
    text = _plain("llama4_text", 48, 5120, 40, 8, **sizes, **_widths(8192, 202048))
    return {"model_type": "llama4", "text_config": text, "vision_config": _LLAMA_4_IMAGES}


def _falcon(layers: int, hidden: int, heads: int, **others: Any) -> dict[str, Any]:
    config = _plain("falcon", layers, hidden, heads, heads, multi_query=True, vocab_size=65024, **others)
    del config["num_key_value_heads"]
    return config


_GEMMA_3_4B = {
    "model_type": "gemma3",
    # The file leaves out the heads, which are the defaults of the class.
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        **_widths(10240, 262208),
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "torch_dtype": "bfloat16",
}
_QWEN_3_30B = _experts(6144, 151936, 768, 128, 8)
_MIXTRAL = {**_widths(14336, 32000), "num_local_experts": 8, "num_experts_per_tok": 2}
_QWEN_3_NEXT = {
    **_experts(5120, 151936, 512, 512, 10),
    "shared_expert_intermediate_size": 512,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
_QWEN_3_5_35B = {**_experts(512, 248320, 512, 256, 8), "shared_expert_intermediate_size": 512}
_QWEN_3_5_122B = {**_experts(1024, 248320, 1024, 256, 8), "shared_expert_intermediate_size": 1024}
_QWEN_3_5_397B = {**_experts(1024, 248320, 1024, 512, 10), "shared_expert_intermediate_size": 1024}
_JAMBA = {
    **_widths(14336, 65536),
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
_BAMBA = {
    **_widths(14336, 128256),
    "attn_layer_indices": [9, 18, 27],
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 128,
}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "lm_head"]}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_GATED = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
}
_QWEN_IMAGES = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}
_GEMMA_4_IMAGES = {
    "model_type": "gemma4_vision",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10240,
}
_GEMMA_4_SMALL_IMAGES = {
    **_GEMMA_4_IMAGES,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
}
_LLAMA_4_IMAGES = {
    "model_type": "llama4_vision_model",
    "hidden_size": 1408,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "image_size": 336,
    "patch_size": 14,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 4096,
}
_FULL_KEYS = {"attention_k_eq_v": True, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
_GEMMA_4_26B = {"enable_moe_block": True, "moe_intermediate_size": 704, "num_experts": 128, "top_k_experts": 8}
_DEEPSEEK_V3 = {
    **_routed(18432, 129280, 2048, 256, 8, 1, 3),
    "num_nextn_predict_layers": 1,
    "quantization_config": _FP8,
}
_DEEPSEEK_V32 = {**_DEEPSEEK_V3, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
_GLM_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
_GLM_5 = {
    **_GLM_LATENT,
    **_routed(12288, 154880, 2048, 256, 8, 1, 3),
    "q_lora_rank": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
}
#: Of every four layers one has an indexer after the first three; the others use its choice.
_GLM_5_2 = {**_GLM_5, "index_topk_freq": 4, "index_skip_topk_offset": 3}
_KIMI_K2 = _routed(18432, 163840, 2048, 384, 8, 1, 1)
_KIMI_IMAGES = {
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
    "mm_hidden_size": 1152,
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
}
_KIMI_K2_5 = {
    "model_type": "kimi_k25",
    "text_config": _deepseek("deepseek_v3", 61, 7168, 64, quantization_config=_INT4, **_KIMI_K2),
    "vision_config": _KIMI_IMAGES,
    "quantization_config": _INT4,
}
_GLM_4_7_FLASH = {
    **_GLM_LATENT,
    **_routed(10240, 154880, 1536, 64, 4, 1, 1),
    "q_lora_rank": 768,
    "num_nextn_predict_layers": 1,
}
_MINIMAX_M2 = {
    **_widths(1536, 200064),
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "quantization_config": _FP8,
}
_LLAMA_2_7B = _plain("llama", 32, 4096, 32, 32, **_widths(11008, 32000), torch_dtype="float16")

_MODELS = (
    KnownModel("llama-2-7b", _LLAMA_2_7B, 6_738_415_616),
    KnownModel("llama-3-8b", _plain("llama", 32, 4096, 32, 8, **_widths(14336, 128256)), 8_030_261_248),
    KnownModel("llama-3.1-8b", _plain("llama", 32, 4096, 32, 8, **_widths(14336, 128256)), 8_030_261_248),
    KnownModel("llama-3.1-70b", _plain("llama", 80, 8192, 64, 8, **_widths(28672, 128256)), 70_553_706_496),
    KnownModel("llama-3.1-405b", _plain("llama", 126, 16384, 128, 8, **_widths(53248, 128256)), 405_853_388_800),
    KnownModel("llama-3.2-1b", _plain("llama", 16, 2048, 32, 8, head_dim=64, **_tied(8192, 128256)), 1_235_814_400),
    KnownModel("llama-3.2-3b", _plain("llama", 28, 3072, 24, 8, head_dim=128, **_tied(8192, 128256)), 3_212_749_824),
    KnownModel("llama-3.3-70b", _plain("llama", 80, 8192, 64, 8, **_widths(28672, 128256)), 70_553_706_496),
    KnownModel("smollm2-135m", _plain("llama", 30, 576, 9, 3, **_tied(1536, 49152)), 134_515_008),
    KnownModel("qwen2.5-7b", _qwen_2_5(28, 3584, 28, 4, 18944), 7_615_616_512),
    KnownModel("qwen2.5-32b", _qwen_2_5(64, 5120, 40, 8, 27648), 32_763_876_352),
    KnownModel("qwen2.5-72b", _qwen_2_5(80, 8192, 64, 8, 29568), 72_706_203_648),
    KnownModel("qwen3-0.6b", _plain("qwen3", 28, 1024, 16, 8, head_dim=128, **_tied(3072, 151936)), 596_049_920),
    KnownModel("qwen3-4b", _plain("qwen3", 36, 2560, 32, 8, head_dim=128, **_tied(9728, 151936)), 4_022_468_096),
    KnownModel("qwen3-8b", _plain("qwen3", 36, 4096, 32, 8, head_dim=128, **_widths(12288, 151936)), 8_190_735_360),
    KnownModel("qwen3-14b", _plain("qwen3", 40, 5120, 40, 8, head_dim=128, **_widths(17408, 151936)), 14_768_307_200),
    KnownModel("qwen3-32b", _plain("qwen3", 64, 5120, 64, 8, head_dim=128, **_widths(25600, 151936)), 32_762_123_264),
    KnownModel("qwen3-30b-a3b", _plain("qwen3_moe", 48, 2048, 32, 4, head_dim=128, **_QWEN_3_30B), 30_532_122_624),
    KnownModel("qwen3-next-80b", _plain("qwen3_next", 48, 2048, 16, 2, **_QWEN_3_NEXT), 79_674_391_296),
    KnownModel(
        "mistral-7b-v0.1",
        _plain("mistral", 32, 4096, 32, 8, sliding_window=4096, **_widths(14336, 32000)),
        7_241_732_096,
    ),
    KnownModel("mixtral-8x7b", _plain("mixtral", 32, 4096, 32, 8, sliding_window=None, **_MIXTRAL), 46_702_792_704),
    KnownModel(
        "gemma-2-2b",
        _plain("gemma2", 26, 2304, 8, 4, head_dim=256, sliding_window=4096, **_widths(9216, 256000)),
        2_614_341_888,
    ),
    KnownModel(
        "gemma-3-1b",
        _plain(
            "gemma3_text",
            26,
            1152,
            4,
            1,
            head_dim=256,
            sliding_window=512,
            sliding_window_pattern=6,
            **_widths(6912, 262144),
        ),
        999_885_952,
    ),
    KnownModel("gemma-3-4b", _GEMMA_3_4B, 3_880_263_168),
    KnownModel("gpt-oss-20b", _gpt_oss(24, 32), 20_914_757_184),
    KnownModel("gpt-oss-120b", _gpt_oss(36, 128), 116_829_156_672),
    KnownModel(
        "deepseek-v2", _deepseek("deepseek_v2", 60, 5120, **_routed(12288, 102400, 1536, 160, 6, 2, 1)), 235_741_434_880
    ),
    KnownModel(
        "deepseek-v3",
        _deepseek("deepseek_v3", 61, 7168, **_DEEPSEEK_V3),
        671_026_419_200,
    ),
    KnownModel("deepseek-v3.2", _deepseek("deepseek_v32", 61, 7168, **_DEEPSEEK_V32), 671_877_944_064),
    KnownModel(
        "kimi-k2",
        _deepseek("kimi_k2", 61, 7168, 64, quantization_config=_FP8, **_KIMI_K2),
        1_026_408_232_448,
    ),
    KnownModel(
        "kimi-k2-thinking",
        _deepseek("kimi_k2", 61, 7168, 64, quantization_config=_INT4, **_KIMI_K2),
        1_026_408_232_448,
    ),
    KnownModel("kimi-k2.5", _KIMI_K2_5, 1_026_408_232_448),
    KnownModel("minimax-m2", _plain("minimax_m2", 62, 3072, 48, 8, head_dim=128, **_MINIMAX_M2), 228_689_764_864),
    KnownModel("qwen3.5-2b", _qwen_3_5(24, 2048, 8, 2, 16, image_layers=24, **_tied(6144, 248320)), 1_881_825_088),
    KnownModel("qwen3.5-4b", _qwen_3_5(32, 2560, 16, 4, 32, image_layers=24, **_tied(9216, 248320)), 4_205_751_296),
    KnownModel("qwen3.5-9b", _qwen_3_5(32, 4096, 16, 4, 32, **_widths(12288, 248320)), 8_953_803_264),
    KnownModel("qwen3.5-27b", _qwen_3_5(64, 5120, 24, 4, 48, **_widths(17408, 248320)), 26_895_998_464),
    KnownModel("qwen3.6-27b", _qwen_3_5(64, 5120, 24, 4, 48, **_widths(17408, 248320)), 26_895_998_464),
    KnownModel("qwen3.5-35b-a3b", _qwen_3_5(40, 2048, 16, 2, 32, **_QWEN_3_5_35B), 34_660_610_688),
    KnownModel("qwen3.6-35b-a3b", _qwen_3_5(40, 2048, 16, 2, 32, **_QWEN_3_5_35B), 34_660_610_688),
    KnownModel("qwen3.5-122b-a10b", _qwen_3_5(48, 3072, 32, 2, 64, **_QWEN_3_5_122B), 122_111_526_912),
    KnownModel("qwen3.5-397b-a17b", _qwen_3_5(60, 4096, 32, 2, 64, **_QWEN_3_5_397B), 396_346_350_336),
    KnownModel(
        "gemma-4-31b",
        _gemma_4(60, 5376, 32, 16, num_global_key_value_heads=4, intermediate_size=21504, **_FULL_KEYS),
        30_697_345_340,
    ),
    KnownModel("gemma-4-e2b", _gemma_4_small(35, 1536, 1, 6144, 20, 5), 4_628_569_379),
    KnownModel("gemma-4-e4b", _gemma_4_small(42, 2560, 2, 10240, 18, 6), 7_463_013_418),
    KnownModel(
        "gemma-4-26b-a4b",
        _gemma_4(30, 2816, 16, 8, num_global_key_value_heads=2, intermediate_size=2112, **_FULL_KEYS, **_GEMMA_4_26B),
        25_233_141_790,
    ),
    KnownModel("glm-4.5", _glm_4_5(92, 5120, True, **_routed(12288, 151552, 1536, 160, 8, 1, 3)), 352_797_829_024),
    KnownModel("glm-4.5-air", _glm_4_5(46, 4096, False, **_routed(10944, 151552, 1408, 128, 8, 1, 1)), 106_852_251_264),
    KnownModel("glm-4.6", _glm_4_5(92, 5120, True, **_routed(12288, 151552, 1536, 160, 8, 1, 3)), 352_797_829_024),
    KnownModel("glm-4.7", _glm_4_5(92, 5120, True, **_routed(12288, 151552, 1536, 160, 8, 1, 3)), 352_797_829_024),
    KnownModel("glm-4.7-flash", _plain("glm4_moe_lite", 47, 2048, 20, 20, **_GLM_4_7_FLASH), 29_943_393_920),
    KnownModel("glm-5", _plain("glm_moe_dsa", 78, 6144, 64, 64, **_GLM_5), 743_911_218_432),
    KnownModel("glm-5.1", _plain("glm_moe_dsa", 78, 6144, 64, 64, **_GLM_5), 743_911_218_432),
    KnownModel("glm-5.2", _plain("glm_moe_dsa", 78, 6144, 64, 64, **_GLM_5_2), 743_377_019_904),
    KnownModel("llama-4-scout", _llama_4(16, 1), 107_769_861_120),
    KnownModel("llama-4-maverick", _llama_4(128, 2), 400_711_848_960),
    KnownModel("falcon-7b", _falcon(32, 4544, 71, new_decoder_architecture=False), 6_921_720_704),
    KnownModel("falcon-40b", _falcon(60, 8192, 128, new_decoder_architecture=True, num_kv_heads=8), 41_303_293_952),
    KnownModel("jamba-v0.1", _plain("jamba", 32, 4096, 32, 8, **_JAMBA), 51_570_323_328),
    KnownModel("bamba-9b", _plain("bamba", 32, 4096, 32, 8, **_BAMBA), 9_780_235_392),
)
_BY_NAME = {model.name: model for model in _MODELS}
