"""Forms of configs: dicts, files, transformers' objects; rules in place of layer lists; refused configs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.errors import ModelError
from blockyard.sizing import AttentionLayer, KVCacheSpec, StateLayer

from ..support.model_configs import (
    BAMBA_9B,
    DEEPSEEK_V3,
    GEMMA_3_4B,
    GPT_OSS_20B,
    LLAMA_3_8B,
    QWEN_2_5_7B,
    QWEN_3_NEXT_80B,
)

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "dtype": "float32",
}
OLMO: dict[str, Any] = {**PLAIN, "model_type": "olmo3"}


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


def kinds(config: dict[str, Any]) -> str:
    """A letter for each attention layer: F full, S sliding; and - for one that keeps nothing in blocks."""
    layers = {layer.index: layer for layer in KVCacheSpec.from_config(config, dtype="bfloat16").layers}
    count = config.get("text_config", config)["num_hidden_layers"]
    return "".join("-" if i not in layers else "FS"[layers[i].sliding_window > 0] for i in range(count))


# ---------------------------------------------------------------- forms


def test_dict_object_file_and_folder_are_the_same(tmp_path: Path) -> None:
    spec = KVCacheSpec.from_config(LLAMA_3_8B)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    assert KVCacheSpec.from_config(SimpleNamespace(**LLAMA_3_8B)) == spec
    assert KVCacheSpec.from_config(tmp_path) == spec
    assert KVCacheSpec.from_config(str(tmp_path / "config.json")) == spec


def test_a_config_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json is nested too deep to be read"):
        KVCacheSpec.from_config(tmp_path)


def test_a_nested_object_is_read_inside() -> None:
    text = SimpleNamespace(**GEMMA_3_4B["text_config"])
    assert KVCacheSpec.from_config(SimpleNamespace(text_config=text, dtype="bfloat16")) == KVCacheSpec.from_config(
        GEMMA_3_4B
    )


def test_older_names_of_fields() -> None:
    spec = KVCacheSpec.from_config(
        {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 32, "torch_dtype": "float32"}
    )
    assert spec == KVCacheSpec.from_config(PLAIN)
    # 4 layers * 2 * 4 heads * 8 * 4 bytes: without KV heads of their own there are as many as query heads.
    assert spec.bytes_per_token == 1_024


def test_values_of_another_size_than_keys() -> None:
    config = {**PLAIN, "model_type": "mimo_v2_flash", "head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 2}
    # 4 layers: a full one of 2 heads and 3 sliding ones of 4, each * (8 + 6) * 4 bytes.
    assert KVCacheSpec.from_config(config).bytes_per_token == (2 + 3 * 4) * 14 * 4


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json could not be read"):
        KVCacheSpec.from_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        KVCacheSpec.from_config(file)
    file.write_text("[]")
    with pytest.raises(ModelError, match="must hold an object"):
        KVCacheSpec.from_config(file)


@pytest.mark.parametrize("config", [None, 3, 2.5, [1]])
def test_values_that_are_not_configs_are_rejected(config: object) -> None:
    with pytest.raises(InvalidArgument, match="config is"):
        KVCacheSpec.from_config(config)


# ---------------------------------------------------------------- which layers slide


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}, "FSFS"),
        ("mistral", {"sliding_window": 8}, "SSSS"),
        ("mistral", {"sliding_window": None}, "FFFF"),
        ("cohere2", {"sliding_window": 8, "sliding_window_pattern": 3}, "SSFS"),
        ("exaone4", {"sliding_window": 8, "sliding_window_pattern": "LLG"}, "SSFS"),
        ("cohere2", {"sliding_window": None, "sliding_window_pattern": 3}, "FFFF"),
        ("gemma2", {"sliding_window": 8, "head_dim": 8, "num_key_value_heads": 4}, "SFSF"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, "FFFS"),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 3}, "FFFF"),
        ("llama4_text", {"attention_chunk_size": 8, "no_rope_layers": [1, 0, 0, 1]}, "SFFS"),
        ("llama4_text", {"attention_chunk_size": 8}, "SSSF"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "mlp", "moe"], "conv_L_cache": 3}, "-F--"),
        ("gemma3n_text", {"num_kv_shared_layers": 2, "sliding_window": 8}, "SS--"),
        ("gemma4_text", {"sliding_window": 8}, "SSSF"),
        ("cwm", {"sliding_window": 8}, "FSSS"),
        ("muse_glimmer_text", {"sliding_window": 8, "num_hidden_layers": 6}, "SFSSSF"),
        ("mimo_v2_flash", {"sliding_window": 8, "num_hidden_layers": 7}, "FSSSSFS"),
        (
            "mimo_v2_flash",
            {"sliding_window": 8, "hybrid_layer_pattern": [0, 1, 1, 0], "swa_num_key_value_heads": 2},
            "FSSF",
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, "FFFS"),
        ("dots1", {"sliding_window": 8, "max_window_layers": 2}, "FFSS"),
        ("bailing_moe_linear", {"layer_group_size": 3, "num_hidden_layers": 8}, "--F--FFF"),
    ],
)
def test_sliding_layers_follow_from_the_config(model_type: str, fields: dict[str, Any], expected: str) -> None:
    heads = {"num_key_value_heads": 2, "hidden_size": 64}
    assert kinds({**PLAIN, **heads, "model_type": model_type, **fields}) == expected


def test_gemma_3_leaves_out_its_pattern() -> None:
    assert kinds(GEMMA_3_4B) == "SSSSSF" * 5 + "SSSS"


def test_a_short_convolution_keeps_the_tokens_before_the_current_one() -> None:
    layers = {"layer_types": ["conv"] * 3 + ["full_attention"], "conv_L_cache": 3, "num_key_value_heads": 4}
    config = {**PLAIN, "model_type": "lfm2", **layers}
    # 3 layers * 32 channels * 2 tokens * 4 bytes.
    assert KVCacheSpec.from_config(config).state_bytes_per_sequence == 768


def test_per_layer_fields_take_precedence() -> None:
    config = {**PLAIN, "per_layer_config": {"03": {"head_dim": 16, "num_key_value_heads": 2}}}
    # 3 layers * 2 * 4 * 8 elements and one of 2 * 2 * 16, of 4 bytes.
    assert KVCacheSpec.from_config(config).bytes_per_token == 4 * (3 * 64 + 64)
    assert KVCacheSpec.from_config(config).layers[3] == AttentionLayer(3, 2, 16, 16)


# ---------------------------------------------------------------- transformers' own classes


def transformers_configs() -> list[tuple[str, dict[str, Any]]]:
    """Names of config classes with sizes small or odd enough that no default could be right by chance."""
    sizes = {"num_hidden_layers": 7, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    return [
        ("LlamaConfig", sizes),
        ("Qwen2Config", sizes),
        ("Qwen2Config", {**sizes, "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 3}),
        ("MistralConfig", {**sizes, "sliding_window": 33}),
        ("Gemma2Config", {**sizes, "head_dim": 20}),
        ("Gemma3TextConfig", {**sizes, "head_dim": 20}),
        ("Cohere2Config", sizes),
        ("GptOssConfig", {**sizes, "head_dim": 20}),
        ("DeepseekV3Config", {"num_hidden_layers": 5, "kv_lora_rank": 24, "qk_rope_head_dim": 8}),
        ("FalconConfig", {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6}),
        ("JambaConfig", {**sizes, "attn_layer_period": 3, "attn_layer_offset": 1}),
        ("Qwen3NextConfig", {**sizes, "num_hidden_layers": 8, "head_dim": 20}),
        ("Llama4TextConfig", {**sizes, "num_hidden_layers": 8}),
        ("FalconH1Config", {**sizes, "mamba_d_ssm": 1024}),
    ]


@pytest.mark.parametrize(("name", "sizes"), transformers_configs())
def test_transformers_objects_mean_what_their_dicts_mean(name: str, sizes: dict[str, Any]) -> None:
    """The object lists its layers; the dict without the list leaves them to the rules here. Both must agree."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**sizes)
    spec = KVCacheSpec.from_config(config, dtype="bfloat16")
    fields = config.to_dict()
    assert KVCacheSpec.from_config(fields, dtype="bfloat16") == spec
    assert KVCacheSpec.from_config(without(fields, "layer_types"), dtype="bfloat16") == spec
    windows = [layer.sliding_window for layer in spec.layers]
    types = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "linear_attention"]
    if types:
        assert [window > 0 for window in windows] == [
            kind in ("sliding_attention", "chunked_attention") for kind in types
        ]


@pytest.mark.parametrize(
    ("name", "sizes", "token"),
    [
        # 7 layers * 2 * 2 heads * 16 * 2 bytes.
        ("LlamaConfig", {"hidden_size": 96, "num_attention_heads": 6}, 896),
        ("Qwen2Config", {"hidden_size": 96, "num_attention_heads": 6}, 896),
        # 7 * 2 * 2 * 20 * 2.
        ("Gemma3TextConfig", {"head_dim": 20, "num_attention_heads": 6}, 1_120),
        # 7 * (24 + 8) * 2.
        ("DeepseekV3Config", {"kv_lora_rank": 24, "qk_rope_head_dim": 8}, 448),
    ],
)
def test_bytes_of_transformers_objects(name: str, sizes: dict[str, Any], token: int) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(num_hidden_layers=7, num_key_value_heads=2, dtype="bfloat16", **sizes)
    assert KVCacheSpec.from_config(config).bytes_per_token == token
    if name == "Gemma3TextConfig":
        whole = transformers.Gemma3Config(text_config=config.to_dict())
        assert KVCacheSpec.from_config(whole, dtype="bfloat16").bytes_per_token == token


# ---------------------------------------------------------------- refused, by name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (without(PLAIN, "num_hidden_layers"), "num_hidden_layers is missing"),
        (without(PLAIN, "num_attention_heads"), "num_attention_heads is missing"),
        (without(PLAIN, "hidden_size"), "hidden_size is missing"),
        (without(PLAIN, "dtype"), "dtype is missing"),
        ({**PLAIN, "dtype": "int4"}, "dtype is 'int4'"),
        ({**PLAIN, "num_hidden_layers": -4}, "num_hidden_layers is -4"),
        ({**PLAIN, "num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; it must be from 1 to 4096"),
        ({**PLAIN, "cross_attention_layers": [1] * 10**5}, r"^.{1,400}$"),
        ({**PLAIN, "dtype": ["x"] * 10**5}, r"^.{1,500}$"),
        ({**PLAIN, "layer_types": "x" * 10**5}, r"^.{1,400}$"),
        ({**PLAIN, "num_attention_heads": 0}, "num_attention_heads is 0"),
        ({**PLAIN, "num_key_value_heads": -1}, "num_key_value_heads is -1"),
        ({**PLAIN, "num_key_value_heads": 3}, "num_key_value_heads is 3; it must divide num_attention_heads, 4"),
        ({**PLAIN, "num_key_value_heads": [1, 2]}, r"num_key_value_heads is \[1, 2\]"),
        ({**PLAIN, "head_dim": 2.5}, "head_dim is 2.5"),
        ({**PLAIN, "hidden_size": 33}, "head_dim is missing; without it hidden_size, 33"),
        ({**PLAIN, "sliding_window": -1, "model_type": "mistral"}, "sliding_window is -1"),
        ({**PLAIN, "model_type": "novel"}, "model_type is 'novel'; the layers of such a model are unknown"),
        (without(PLAIN, "model_type"), "model_type is missing"),
        ({**PLAIN, "sliding_window": 8}, "sliding_window is 8; it may change the cache"),
        ({**PLAIN, "model_type": "exaone4", "sliding_window_pattern": "LX"}, "sliding_window_pattern is 'LX'"),
        ({**PLAIN, "model_type": "qwen2", "use_sliding_window": 1, "sliding_window": 8}, "use_sliding_window is 1"),
        (
            {**PLAIN, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers is missing",
        ),
        ({**OLMO, "layer_types": ["full_attention"]}, "layer_types has 1 entries; num_hidden_layers is 4"),
        ({**OLMO, "layer_types": ["full_attention"] * 3 + ["warp"]}, r"layer_types\[3\] is 'warp'"),
        ({**OLMO, "layer_types": ["sliding_attention"] * 4, "sliding_window": None}, "sliding_window is missing"),
        ({**OLMO, "layer_types": 4}, "layer_types is 4"),
        ({**OLMO, "layer_types": ["full_attention", "mamba"] * 2}, "layer 1 keeps a state"),
        ({**OLMO, "layer_types": ["mlp"] * 4}, "layers is empty"),
        ({**PLAIN, "model_type": "llama4_text", "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ({**PLAIN, "model_type": "gemma3n_text", "num_kv_shared_layers": 4}, "num_kv_shared_layers is 4"),
        ({**PLAIN, "per_layer_config": 3}, "per_layer_config is 3"),
        ({**PLAIN, "is_encoder_decoder": True}, "is_encoder_decoder is True"),
        ({**PLAIN, "cross_attention_layers": [1]}, "cross_attention_layers is"),
        ({**PLAIN, "model_type": "zamba"}, "model_type is 'zamba'"),
        ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk is 2048"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (without(BAMBA_9B, "attn_layer_indices"), "attn_layer_indices and layer_types are missing"),
        ({**BAMBA_9B, "mamba_n_groups": None}, "mamba_n_groups is missing"),
        ({**QWEN_3_NEXT_80B, "linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
        ({**GPT_OSS_20B, "sliding_window": None}, "sliding_window is missing"),
        ({**QWEN_2_5_7B, "num_hidden_layers": True}, "num_hidden_layers is True"),
    ],
)
def test_a_bad_config_is_refused_by_the_fields_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        KVCacheSpec.from_config(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be from 1 to 4096"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"state_dtype": "int8"}, "state_dtype is 'int8'"),
        ({"layers_per_group": -1}, "layers_per_group is -1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        KVCacheSpec.from_config(LLAMA_3_8B, **options)


def test_bad_layers_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="layers is"):
        KVCacheSpec([AttentionLayer(0, 1, 1, 1)])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="layers is empty"):
        KVCacheSpec(())
    with pytest.raises(InvalidArgument, match="parts is"):
        StateLayer(0, "odd", (1,))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_kv_heads is 0"):
        AttentionLayer(0, 0, 1, 1)


@pytest.mark.parametrize("bad", [-1, 2**40, 1.5, "7", None])
def test_bad_lengths_are_refused(bad: object) -> None:
    spec = KVCacheSpec.from_config(LLAMA_3_8B)
    with pytest.raises(InvalidArgument, match="num_tokens is"):
        spec.sequence_blocks(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_tokens is"):
        spec.peak_sequence_bytes(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="num_computed is 9"):
        spec.sequence_blocks(8, 9)
