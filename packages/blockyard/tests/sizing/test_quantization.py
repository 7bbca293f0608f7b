"""Bytes of quantized weights, beside the sizes of published files; and kinds that are refused by name.

A published size is what an engine logged of a file ("Checkpoint size"), or the file's index says. `is_fitted` marks
those that the code was written with; the others were computed once it stood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import known_model, model_weights

GIB = 2**30
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.visual"]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}


def packed(weights: dict[str, Any], ignore: list[str], **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, **others}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ignore}


INT4_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
QWEN_IGNORES = [
    "re:.*visual.*",
    "re:.*linear_attn.*",
    "re:.*mlp.gate$",
    "re:.*shared_expert.*",
    "lm_head",
    "re:.*mtp.*",
]


@dataclass(frozen=True, slots=True)
class PublishedSize:
    """has_drafts: whether the file has the layers that predict further tokens. shared: copies of embedding and head."""

    model: str
    gib: float
    quantization: dict[str, Any] | None = None
    has_drafts: bool = False
    shared: int = 0
    tolerance: float = 0.002
    is_fitted: bool = False


SIZES = (
    PublishedSize("qwen3.5-27b", 51.75, has_drafts=True, is_fitted=True),
    PublishedSize("qwen3.5-27b", 28.75, FP8, has_drafts=True, is_fitted=True),
    PublishedSize("gpt-oss-20b", 13_761_264_768 / GIB, tolerance=1e-6, is_fitted=True),
    PublishedSize("gpt-oss-120b", 65_248_815_744 / GIB, tolerance=1e-6, is_fitted=True),
    PublishedSize("gemma-4-31b", 58.25),
    PublishedSize("qwen3-8b", 5.68, AWQ),
    PublishedSize("minimax-m2", 121.53, packed(INT4_32, ["lm_head", "re:.*block_sparse_moe.gate$"])),
    PublishedSize("deepseek-v3", 688_586_727_753 / GIB, has_drafts=True, shared=2),
    PublishedSize("kimi-k2-thinking", 594e9 / GIB),
    PublishedSize("kimi-k2.5", 554.27, tolerance=1e-4),
    PublishedSize("glm-5.2", 1.51e12 / GIB, has_drafts=True, tolerance=0.003),
    PublishedSize("qwen3.6-35b-a3b", 23.32, packed(NVFP4, QWEN_IGNORES), has_drafts=True, tolerance=0.01),
)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.model} {size.gib:.1f} GiB")
def test_sizes_are_those_of_published_files(size: PublishedSize) -> None:
    config = known_model(size.model).config
    found = model_weights({**config, "quantization_config": size.quantization or config.get("quantization_config")})
    total = found.file_bytes + size.has_drafts * found.draft_rank_bytes
    total += size.shared * 2 * 129280 * 7168
    assert total / GIB == pytest.approx(size.gib, rel=size.tolerance)


def test_fp8_blocks_have_a_scale_each() -> None:
    config = {**known_model("qwen3-30b-a3b").config, "quantization_config": FP8}
    assert model_weights(config).file_bytes / GIB == pytest.approx(29.03, abs=0.01)
    assert model_weights(config, dtype="bfloat16").file_bytes / GIB == pytest.approx(56.87, abs=0.01)


SMALL = {
    "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "dtype": "bfloat16",
}  # fmt: skip
#: q, k, v, o; gate, up, down: rows and columns.
LINEAR = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
OTHER_BYTES = 2 * (2 * 1000 * 256 + 3 * 256 + 2 * 64)


def linear_bytes(quantization: dict[str, Any]) -> int:
    """Bytes of the seven linear layers, with embedding, head and norms as they are."""
    return model_weights({**SMALL, "quantization_config": quantization}).file_bytes - OTHER_BYTES


def of_all(bits: int, scales: int = 0, fixed: int = 0, group: int = 0, column_bytes: int = 0) -> int:
    total = 0
    for rows, columns in LINEAR:
        total += rows * columns * bits // 8 + fixed + columns * column_bytes
        total += rows * (columns // group if group else 1) * scales
    return total


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8"}, of_all(8, fixed=4 + 0)),
        ({"quant_method": "fp8", "activation_scheme": "static"}, of_all(8, fixed=8)),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": []}, of_all(8, scales=4)),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, of_all(8, fixed=8)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]},
         of_all(4, scales=1, group=16, fixed=8)),
        ({"quant_algo": "NVFP4", "ignore": ["lm_head"]}, of_all(4, scales=1, group=16, fixed=8)),
        (packed(NVFP4, ["lm_head"]), of_all(4, scales=1, group=16, fixed=8)),
        (packed({"num_bits": 8, "type": "float", "strategy": "channel"}, ["lm_head"]), of_all(8, scales=2)),
        (packed({"num_bits": 8, "type": "int", "strategy": "channel"}, ["lm_head"]), of_all(8, scales=2)),
        (packed(INT4_32, ["lm_head"], format="pack-quantized"), of_all(4, scales=2, group=32, fixed=16)),
        (packed(INT4_32, ["lm_head", "model.layers.0"], format="pack-quantized"),
         of_all(4, scales=2, group=32, fixed=16)),  # names one module, and nothing inside it
        ({"quant_method": "gptq", "bits": 4, "group_size": 128},
         of_all(4, scales=2, group=128, column_bytes=4) + of_all(0, scales=1, group=256)),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, of_all(4, scales=4, group=64)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, of_all(8, scales=4)),
        ({"quant_method": "auto-round", "bits": 8, "group_size": 64, "data_type": "int"},
         of_all(8, scales=3, group=64)),
        ({"quant_method": "quark", "exclude": ["lm_head"],
          "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}}},
         of_all(4, scales=1, group=32)),
    ],
)  # fmt: skip
def test_each_quantization_method_is_read(quantization: dict[str, Any], expected: int) -> None:
    assert linear_bytes(quantization) == expected


@pytest.mark.parametrize(
    "skipped",
    [
        {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "mlp"]},
        {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn", "model.layers.0.mlp"]},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["model.layers.0."]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*self_attn*", "*mlp*", "lm_head"]},
        packed(NVFP4, ["re:.*self_attn.*", "re:model.*mlp", "lm_head"]),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*layers.0.*": {}}},
        {"quant_method": "mxfp4"},
    ],
)
def test_skipped_modules_keep_their_type(skipped: dict[str, Any]) -> None:
    assert linear_bytes(skipped) == of_all(16)


def test_the_type_of_the_cache_that_a_file_asks_for() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    for quantization in (
        {**packed(NVFP4, ["lm_head"]), "kv_cache_scheme": scheme},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    ):
        assert model_weights({**SMALL, "quantization_config": quantization}).cache_dtype == "fp8"
    assert model_weights({**SMALL, "quantization_config": FP8}).cache_dtype == ""


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "gguf"}, "quant_method is 'gguf'; the size of such weights is unknown"),
        ({"quant_method": "torchao"}, "quant_method is 'torchao'"),
        ({"quant_method": "new"}, "quant_method is 'new'"),
        ({}, "quant_method is None"),
        ({"quant_method": "awq", "bits": 7}, "bits is 7; it must be one of 2, 3, 4, 5, 6, 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "modelopt", "quant_algo": "FP3"}, "quant_algo is 'FP3'"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is None"),
        (packed({"num_bits": 4, "strategy": "odd"}, []), "strategy is 'odd'"),
        (packed(INT4_32, [], format="marlin-24"), "format is 'marlin-24'"),
        (packed(NVFP4, ["re:["]), r"has the invalid pattern '\['"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; it must be two numbers"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
    ],
)
def test_unknown_quantizations_are_rejected_by_name(quantization: object, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        model_weights({**SMALL, "quantization_config": quantization})
