"""Bytes of tokens and blocks, computed by hand from published configs; groups and sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import InvalidArgument
from blockyard.config import cache_config
from blockyard.groups import LayerGroup
from blockyard.sizing import AttentionLayer, KVCacheSpec, num_cpu_blocks
from blockyard.windows import num_peak_blocks
from blockyard_testing.seeds import run_seed

from ..support import model_configs as published
from ..support.model_configs import GEMMA_3_1B, GPT_OSS_20B, LLAMA_3_8B, MISTRAL_7B_V0_1

#: config, bytes of a token in all layers, bytes of a block of 16 tokens, layers by kind. Bytes are of 2-byte types.
MODELS: list[tuple[str, dict[str, Any], int, int, dict[str, int]]] = [
    # 32 layers * 2 * 32 heads * 128 * 2 bytes = 524,288: half a MiB a token, 8 MiB a block.
    ("Llama-2-7B", published.LLAMA_2_7B, 524_288, 8_388_608, {"full": 32}),
    # 32 * 2 * 8 * 128 * 2 = 131,072: a quarter, for a quarter of the KV heads.
    ("Llama-3-8B", LLAMA_3_8B, 131_072, 2_097_152, {"full": 32}),
    # 30 * 2 * 3 * (576 / 9 = 64) * 2 = 23,040; * 16 = 368,640.
    ("SmolLM2-135M", published.SMOLLM2_135M, 23_040, 368_640, {"full": 30}),
    # 28 * 2 * 4 * (3584 / 28 = 128) * 2 = 57,344; * 16 = 917,504. Its window is switched off.
    ("Qwen2.5-7B", published.QWEN_2_5_7B, 57_344, 917_504, {"full": 28}),
    # 32 * 2 * 8 * 128 * 2 = 131,072; all layers slide, so they are one group.
    ("Mistral-7B-v0.1", MISTRAL_7B_V0_1, 131_072, 2_097_152, {"sliding": 32}),
    # A layer's token is 2 * 4 * 256 * 2 = 4,096; * 26 = 106,496. Every second layer is full: 13 and 13,
    # so a block is that of 13 layers: 13 * 4,096 * 16 = 851,968.
    ("Gemma-2-2B", published.GEMMA_2_2B, 106_496, 851_968, {"sliding": 13, "full": 13}),
    # A layer's token is 2 * 1 * 256 * 2 = 1,024; * 26 = 26,624. Layers 5, 11, 17, 23 are full, 22 slide;
    # groups of 4 layers: 4 * 1,024 * 16 = 65,536.
    ("Gemma-3-1B", GEMMA_3_1B, 26_624, 65_536, {"sliding": 22, "full": 4}),
    # 2 * 4 * 256 * 2 = 4,096 a layer; * 34 = 139,264. Layers 5, 11, ..., 29 are full: 5; 5 * 4,096 * 16 = 327,680.
    ("Gemma-3-4B", published.GEMMA_3_4B, 139_264, 327_680, {"sliding": 29, "full": 5}),
    # 2 * 8 * 64 * 2 = 2,048 a layer; * 24 = 49,152; groups of 12 layers: 12 * 2,048 * 16 = 393,216.
    ("gpt-oss-20b", GPT_OSS_20B, 49_152, 393_216, {"sliding": 12, "full": 12}),
    # One vector of 512 + 64 a layer: 60 * 576 * 2 = 69,120; * 16 = 1,105,920.
    ("DeepSeek-V2", published.DEEPSEEK_V2, 69_120, 1_105_920, {"latent": 60}),
    # 61 * 576 * 2 = 70,272; * 16 = 1,124,352. The layer that predicts further tokens is not counted.
    ("DeepSeek-V3", published.DEEPSEEK_V3, 70_272, 1_124_352, {"latent": 61}),
    # Multi-query: 32 * 2 * 1 * (4544 / 71 = 64) * 2 = 8,192; * 16 = 131,072.
    ("Falcon-7B", published.FALCON_7B, 8_192, 131_072, {"full": 32}),
    # Its successor has 8 KV heads: 60 * 2 * 8 * (8192 / 128 = 64) * 2 = 122,880; * 16 = 1,966,080.
    ("Falcon-40B", published.FALCON_40B, 122_880, 1_966_080, {"full": 60}),
    # 48 / 4 = 12 layers of attention: 12 * 2 * 2 * 256 * 2 = 24,576; * 16 = 393,216.
    ("Qwen3-Next-80B", published.QWEN_3_NEXT_80B, 24_576, 393_216, {"full": 12, "gated delta net": 36}),
    # Layers 4, 12, 20, 28: 4 * 2 * 8 * 128 * 2 = 16,384; * 16 = 262,144.
    ("Jamba-v0.1", published.JAMBA_V0_1, 16_384, 262_144, {"full": 4, "mamba": 28}),
    # 3 * 2 * 8 * 128 * 2 = 12,288; * 16 = 196,608.
    ("Bamba-9B", published.BAMBA_9B, 12_288, 196_608, {"full": 3, "mamba2": 29}),
]


def spec_of(config: dict[str, Any], **options: Any) -> KVCacheSpec:
    """The spec of a config; gpt-oss publishes no type, so the cache's is given."""
    return KVCacheSpec.from_config(config, **{"dtype": "bfloat16", **options})


@pytest.mark.parametrize(("config", "token", "block", "kinds"), [m[1:] for m in MODELS], ids=[m[0] for m in MODELS])
def test_bytes_of_published_models(config: dict[str, Any], token: int, block: int, kinds: dict[str, int]) -> None:
    spec = spec_of(config)
    assert spec.bytes_per_token == token
    assert spec.bytes_per_block == block
    assert spec.num_layers_by_kind == kinds


# ---------------------------------------------------------------- dtypes, block sizes, ranks


@pytest.mark.parametrize(
    ("dtype", "token"), [("float32", 262_144), ("bfloat16", 131_072), ("float16", 131_072), ("fp8_e4m3", 65_536)]
)
def test_the_cache_may_have_a_type_of_its_own(dtype: str, token: int) -> None:
    assert KVCacheSpec.from_config(LLAMA_3_8B, dtype=dtype).bytes_per_token == token


def test_cache_uses_the_models_dtype_by_default() -> None:
    assert KVCacheSpec.from_config({**LLAMA_3_8B, "torch_dtype": "float32"}).bytes_per_token == 262_144
    assert KVCacheSpec.from_config(published.GEMMA_3_4B).dtype == "bfloat16"  # stands outside the text config


@pytest.mark.parametrize("block_size", [1, 8, 16, 128])
def test_a_block_has_the_bytes_of_its_tokens(block_size: int) -> None:
    assert spec_of(LLAMA_3_8B, block_size=block_size).bytes_per_block == block_size * 131_072


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_ranks_share_kv_heads_and_never_keep_less_than_one(ranks: int, heads: int) -> None:
    # 32 layers * 2 * 128 * 2 bytes = 16,384 a head.
    assert spec_of(LLAMA_3_8B, tensor_parallel_size=ranks).bytes_per_token == heads * 16_384


@pytest.mark.parametrize("ranks", [3, 5, 12])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"tensor_parallel_size is {ranks}.*num_kv_heads, 8"):
        spec_of(LLAMA_3_8B, tensor_parallel_size=ranks)


def test_every_rank_keeps_the_whole_latent_vector() -> None:
    assert spec_of(published.DEEPSEEK_V3, tensor_parallel_size=16).bytes_per_token == 70_272


# ---------------------------------------------------------------- groups


def test_a_plain_model_is_one_group() -> None:
    assert spec_of(LLAMA_3_8B, block_size=32).groups == (LayerGroup(32, 0, name="full", token_bytes=131_072),)
    assert spec_of(MISTRAL_7B_V0_1).groups == (LayerGroup(16, 4096, name="window 4096", token_bytes=131_072),)


def test_groups_of_gemma_3() -> None:
    """22 sliding and 4 full layers: groups of 4 layers, 1 full and 6 sliding; the last has 2 layers and is padded."""
    pages = spec_of(GEMMA_3_1B).page_groups
    assert [page.group.sliding_window for page in pages] == [0] + [512] * 6
    assert [page.group.block_size for page in pages] == [16] * 7
    assert pages[0].layers == (5, 11, 17, 23)
    assert pages[1].layers == (0, 1, 2, 3)
    assert pages[6].layers == (24, 25)
    # 4 layers * 1,024 bytes * 16 tokens, and half of it.
    assert [page.used_bytes for page in pages] == [65_536] * 6 + [32_768]
    assert sorted(layer for page in pages for layer in page.layers) == list(range(26))


def test_nearly_equal_counts_make_one_group_each() -> None:
    """5 full and 6 sliding layers: 6 < 1.25 * 5, so groups have 6 layers and the full one is padded by one."""
    layers = tuple(AttentionLayer(i, 1, 4, 4, sliding_window=8 * (i % 2 == 0)) for i in range(11))
    pages = KVCacheSpec(layers, block_size=16).page_groups
    # 5 layers * 8 elements * 2 bytes * 16 tokens = 1,280; 6 layers: 1,536.
    assert [(len(page.layers), page.used_bytes) for page in pages] == [(5, 1_280), (6, 1_536)]
    assert KVCacheSpec(layers, block_size=16).bytes_per_block == 1_536


def test_layers_per_group_can_be_chosen() -> None:
    spec = spec_of(GEMMA_3_1B, layers_per_group=2)
    # 22 / 2 + 4 / 2 = 13 groups without padding; 2 * 1,024 * 16 = 32,768.
    assert len(spec.groups) == 13
    assert {page.used_bytes for page in spec.page_groups} == {spec.bytes_per_block} == {32_768}


@pytest.mark.parametrize(
    ("heads", "block_size", "used"), [(1, 64, 1_024), (2, 32, 1_024), (3, 16, 768), (4, 16, 1_024)]
)
def test_smaller_tokens_get_larger_blocks(heads: int, block_size: int, used: int) -> None:
    """A full layer of 4 heads: 4 * 8 * 2 bytes = 64 a token, 1,024 a block of 16.

    A sliding one of 1 head has 16 a token, so its block holds 64; of 3 heads 48, where 32 tokens would not fit: 16
    tokens, 768 bytes and padding.
    """
    layers = (AttentionLayer(0, 4, 4, 4), AttentionLayer(1, heads, 4, 4, sliding_window=8))
    spec = KVCacheSpec(layers, block_size=16)
    assert spec.bytes_per_block == 1_024
    assert spec.groups[1].block_size == block_size
    assert spec.page_groups[1].used_bytes == used


def test_layers_of_one_window_share_a_table_however_they_differ() -> None:
    layers = (AttentionLayer(0, 4, 4, 4), AttentionLayer(1, 1, 4, 2))
    spec = KVCacheSpec(layers, block_size=16)
    # (4 * 8 + 1 * 6) elements * 2 bytes * 16 tokens.
    assert spec.bytes_per_block == 1_216
    assert len(spec.groups) == 1


def test_blocks_of_every_group_have_equal_bytes_and_hold_their_layers() -> None:
    rng = random.Random(run_seed())
    for _ in range(200):
        windows = [rng.choice([0, 0, 32, 100]) for _ in range(rng.randint(1, 20))]
        heads = {window: rng.choice([1, 2, 3, 8]) for window in (0, 32, 100)}
        layers = tuple(AttentionLayer(i, heads[w], 8, 8, sliding_window=w) for i, w in enumerate(windows))
        spec = KVCacheSpec(layers, block_size=rng.choice([1, 8, 16]))
        assert sorted(layer for page in spec.page_groups for layer in page.layers) == list(range(len(layers)))
        for page in spec.page_groups:
            token = sum(heads[windows[layer]] * 16 * 2 for layer in page.layers)
            assert page.used_bytes == token * page.group.block_size <= spec.bytes_per_block
            assert {windows[layer] for layer in page.layers} == {page.group.sliding_window}
            assert page.group.block_size % spec.block_size == 0


# ---------------------------------------------------------------- sequences


def test_a_plain_sequence_takes_its_blocks() -> None:
    spec = spec_of(LLAMA_3_8B)
    assert [spec.sequence_blocks(n) for n in (0, 1, 16, 17, 50)] == [0, 1, 1, 2, 4]
    assert spec.sequence_bytes(50) == 4 * 2_097_152
    assert spec.peak_sequence_blocks(50) == 4


def test_a_window_caps_a_sequence() -> None:
    """Token 32,767 attends to 28,672 .. 32,767: blocks 1,792 to 2,047, that is 256 of them."""
    spec = spec_of(MISTRAL_7B_V0_1)
    assert spec.sequence_blocks(32_768) == 256
    # One token further the window ends in a 257th block and still begins in the first token of another.
    assert spec.sequence_blocks(32_769) == 257
    assert spec.peak_sequence_blocks(32_769) == spec.peak_sequence_blocks(10**6) == 257
    # A prompt computed in one step holds all of its blocks.
    assert spec.sequence_blocks(32_768, 0) == 2048
    # Its last chunk of 2,048 tokens, from 30,720 on, attends from 26,625 on: blocks 1,664 to 2,047, 384 of them.
    # Chunks that end elsewhere need one more: 4,096 + 2,048 - 1 tokens touch at most 385 blocks.
    assert spec.sequence_blocks(32_768, 30_720) == 384
    assert spec.peak_sequence_blocks(32_769, tokens_per_step=2048) == 385


def test_a_hybrid_sequence_is_the_sum_of_its_groups() -> None:
    spec = spec_of(GEMMA_3_1B)
    # Full: 32,768 / 16 = 2,048. Each of six sliding groups: 512 / 16 = 32. 2,048 + 192 = 2,240.
    assert spec.sequence_blocks(32_768) == 2_240
    assert spec.sequence_bytes(32_768) == 2_240 * 65_536
    # An engine without groups keeps all 26 layers of every token: 32,768 * 26,624 bytes, six times as much.
    assert spec.without_windows().sequence_bytes(32_768) == 872_415_232
    # gpt-oss: 131,072 / 16 = 8,192 and 128 / 16 = 8; at its fullest the window lies in 9 blocks.
    assert spec_of(GPT_OSS_20B).sequence_blocks(131_072) == 8_200
    assert spec_of(GPT_OSS_20B).peak_sequence_blocks(131_072) == 8_201


def test_the_peak_is_the_largest_count_on_the_way() -> None:
    rng = random.Random(run_seed())
    for _ in range(100):
        window, block_size, step = rng.choice([0, 1, 5, 16, 40]), rng.choice([1, 3, 8, 16]), rng.randint(1, 40)
        spec = KVCacheSpec((AttentionLayer(0, 1, 1, 1, sliding_window=window),), block_size=block_size)
        length = rng.randint(1, 150)
        counts = [spec.sequence_blocks(n, max(n - step, 0)) for n in range(1, length + 1)]
        assert spec.peak_sequence_blocks(length, step) == max(counts)


def test_how_many_sequences_fit() -> None:
    spec = spec_of(GPT_OSS_20B)
    # Each needs 8,201 blocks of 393,216 bytes at its fullest; the null block is one more.
    enough = (1 + 3 * 8_201) * 393_216
    assert spec.max_concurrent_sequences(131_072, memory_bytes=enough) == 3
    assert spec.max_concurrent_sequences(131_072, memory_bytes=enough - 1) == 2
    assert spec.max_concurrent_sequences(131_072, num_blocks=1 + 3 * 8_201) == 3
    assert spec.max_concurrent_sequences(131_072, num_blocks=3 * 8_201) == 2
    assert spec.max_concurrent_sequences(131_072, num_blocks=0) == 0
    with pytest.raises(InvalidArgument, match="give exactly one"):
        spec.max_concurrent_sequences(100)
    with pytest.raises(InvalidArgument, match="give exactly one"):
        spec.max_concurrent_sequences(100, num_blocks=1, memory_bytes=1)


# ---------------------------------------------------------------- states


def test_states_of_gated_delta_nets() -> None:
    """A layer: convolutions over 4 tokens keep 3 of 2 * 16 * 128 queries and keys and 32 * 128 values, 24,576 elements
    of 2 bytes; the recurrent state has 32 * 128 * 128 of 4 bytes: 49,152 + 2,097,152 = 2,146,304. 36 layers."""
    spec = spec_of(published.QWEN_3_NEXT_80B)
    assert spec.state_bytes_per_sequence == 36 * 2_146_304
    assert spec.sequence_bytes(16) == 393_216 + 36 * 2_146_304
    assert spec_of(published.QWEN_3_NEXT_80B, tensor_parallel_size=2).state_bytes_per_sequence == 18 * 2_146_304
    half = spec_of(published.QWEN_3_NEXT_80B, state_dtype="bfloat16")
    assert half.state_bytes_per_sequence == 36 * (49_152 + 1_048_576)


def test_states_of_mamba() -> None:
    # 2 * 4096 channels: 3 tokens of 2 bytes and 16 numbers of 4 bytes: 8,192 * (6 + 64) = 573,440. 28 layers.
    assert spec_of(published.JAMBA_V0_1).state_bytes_per_sequence == 28 * 573_440
    # The cache's type is not the states'.
    assert spec_of(published.JAMBA_V0_1, dtype="fp8").state_bytes_per_sequence == 28 * 573_440


def test_states_of_mamba_2() -> None:
    """128 heads of 64 and one group of B and C of 128: (8,192 + 256) * 3 * 2 bytes = 50,688, and 128 * 64 * 128 * 4 =
    4,194,304. 29 layers. Two ranks share the heads, not the one group."""
    assert spec_of(published.BAMBA_9B).state_bytes_per_sequence == 29 * (50_688 + 4_194_304)
    two = spec_of(published.BAMBA_9B, tensor_parallel_size=2)
    assert two.state_bytes_per_sequence == 29 * ((4_096 + 256) * 6 + 2_097_152)


def test_states_count_towards_how_many_sequences_fit() -> None:
    spec = spec_of(published.JAMBA_V0_1)
    # One block and one state a sequence, and the null block.
    each = 262_144 + 28 * 573_440
    assert spec.max_concurrent_sequences(16, memory_bytes=262_144 + 5 * each) == 5
    assert spec.max_concurrent_sequences(16, memory_bytes=262_144 + 5 * each - 1) == 4


# ---------------------------------------------------------------- a config for the manager


def test_a_config_for_the_manager() -> None:
    config = spec_of(LLAMA_3_8B, block_size=32).cache_config(1000, max_num_seqs=8, max_model_len=512, watermark=0.0)
    groups = (LayerGroup(32, 0, name="full", token_bytes=131_072),)
    fields = {"block_size": 32, "max_num_seqs": 8, "max_model_len": 512, "watermark": 0.0, "groups": groups}
    assert config == cache_config(num_blocks=1000, **fields)


@pytest.mark.parametrize("published_config", [LLAMA_3_8B, GEMMA_3_1B, published.GPT_OSS_20B, published.DEEPSEEK_V3])
def test_a_budget_of_bytes_is_the_blocks_that_sizing_counts(published_config: dict[str, Any]) -> None:
    spec = spec_of(published_config)
    config = spec.cache_config(num_bytes=2**30)
    assert config.groups == spec.groups
    assert config.block_bytes == spec.bytes_per_block
    assert config.num_blocks == num_cpu_blocks(2**30, spec=spec)
    held = spec.peak_sequence_blocks(5000)
    lost = zip(spec.groups, config.padding_bytes, strict=True)
    each = [num_peak_blocks(5000, 1, group.sliding_window, group.block_size) * padding for group, padding in lost]
    assert spec.padding_bytes(5000) == sum(each) < held * spec.bytes_per_block


def test_a_field_that_the_config_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"num_blobs is 3; CacheConfig has no such field"):
        spec_of(LLAMA_3_8B).cache_config(1000, num_blobs=3)
