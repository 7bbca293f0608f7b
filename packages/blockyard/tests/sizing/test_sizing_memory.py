"""How many blocks fit, advice with its reasons, and the tensors that the bytes are of."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from blockyard import InvalidArgument
from blockyard.sizing import (
    KVCacheSpec,
    MemoryProfile,
    advise_block_size,
    advise_cache_budget,
    num_cpu_blocks,
    num_gpu_blocks,
    profile,
)
from blockyard_testing.places import PACKAGE_DIR
from blockyard_testing.seeds import run_seed

from ..support.model_configs import JAMBA_V0_1, LLAMA_3_8B

GIB = 2**30
#: A block is 2 MiB.
LLAMA = KVCacheSpec.from_config(LLAMA_3_8B)
#: A block is 256 KiB, a state 28 * 573,440 = 16,056,320 bytes.
JAMBA = KVCacheSpec.from_config(JAMBA_V0_1)

# ---------------------------------------------------------------- numbers of blocks


def test_gpu_blocks_follow_vllms_rule() -> None:
    # 80 GiB * 0.92 - 20 GiB = 53.6 GiB; / 2 MiB = 27,443.2.
    assert num_gpu_blocks(80 * GIB, 20 * GIB, spec=LLAMA) == 27_443
    # 80 GiB * 0.5 - 20 GiB = 20 GiB; / 2 MiB = 10,240; one byte less is one block less.
    assert num_gpu_blocks(80 * GIB, 20 * GIB, 0.5, spec=LLAMA) == 10_240
    assert num_gpu_blocks(80 * GIB, 20 * GIB + 1, 0.5, spec=LLAMA) == 10_239


def test_blocks_are_never_negative() -> None:
    assert num_gpu_blocks(16 * GIB, 15 * GIB, spec=LLAMA) == 0
    assert num_gpu_blocks(0, 0, spec=LLAMA) == 0
    assert num_cpu_blocks(0, spec=LLAMA) == 0


def test_cpu_blocks_fill_the_swap_space() -> None:
    # 4 GiB, the default, / 2 MiB.
    assert num_cpu_blocks(spec=LLAMA) == num_cpu_blocks(4 * GIB, spec=LLAMA) == 2_048


def test_memory_for_states_is_reserved_first() -> None:
    # 10 GiB - 64 * 16,056,320 = 9,709,813,760; / 262,144 = 37,040.0 blocks.
    assert num_gpu_blocks(10 * GIB, 0, 1.0, spec=JAMBA, max_num_seqs=64) == 37_040
    assert num_cpu_blocks(10 * GIB, spec=JAMBA, max_num_seqs=64) == 37_040
    with pytest.raises(InvalidArgument, match=r"max_num_seqs is 0; .* a state of 16056320 bytes"):
        num_gpu_blocks(10 * GIB, 0, spec=JAMBA)


def test_a_profile_is_measured_once_or_given() -> None:
    calls: list[int] = []

    def measure() -> tuple[int, int]:
        calls.append(1)
        return 80 * GIB, 20 * GIB

    measured = profile(measure)
    assert measured == MemoryProfile(80 * GIB, 20 * GIB)
    assert measured.num_gpu_blocks(LLAMA) == 27_443
    assert measured.num_gpu_blocks(LLAMA, 0.5) == 10_240
    assert len(calls) == 1


@pytest.mark.parametrize("returned", [3, (1, 2, 3), (-1, 2), (1, "2"), None])
def test_a_bad_measurement_is_refused(returned: object) -> None:
    with pytest.raises(InvalidArgument, match=r"measure returned|total_bytes is|peak_bytes is"):
        profile(lambda: returned)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("share", [0, -0.1, 1.1, True, "0.9", float("nan")])
def test_bad_utilization_is_refused(share: float) -> None:
    with pytest.raises(InvalidArgument, match="gpu_memory_utilization is"):
        num_gpu_blocks(GIB, 0, share, spec=LLAMA)


def test_bad_amounts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="total_bytes is -1"):
        num_gpu_blocks(-1, 0, spec=LLAMA)
    with pytest.raises(InvalidArgument, match="peak_bytes is -1"):
        num_gpu_blocks(GIB, -1, spec=LLAMA)
    with pytest.raises(InvalidArgument, match=r"swap_bytes is 4\.5"):
        num_cpu_blocks(4.5, spec=LLAMA)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="spec is 16"):
        num_cpu_blocks(GIB, spec=16)  # type: ignore[arg-type]


# ---------------------------------------------------------------- advice


@pytest.mark.parametrize(
    ("mean", "block_size"),
    # The root lies between two powers; by ratio 16 begins at 8 * sqrt(2), a mean of 128, and ends at 512.
    [
        (1, 8),
        (64, 8),
        (127, 8),
        (128, 16),
        (256, 16),
        (511, 16),
        (512, 32),
        (1000, 32),
        (2048, 64),
        (16_384, 128),
        (10**6, 128),
    ],
)
def test_block_size_advice_follows_the_mean_length(mean: int, block_size: int) -> None:
    assert advise_block_size(mean).block_size == block_size


def test_a_block_size_comes_with_its_reasons() -> None:
    advice = advise_block_size(1000)
    # Half of 32 - 1 slots, 3.1 and 15.5 / 1000; 1000 / 32 = 31.25, so 32 entries.
    assert (advice.expected_waste_tokens, advice.table_entries) == (15.5, 32)
    assert advice.reasons == (
        "The square root of 1000 tokens is 31.6; the nearest power of two by ratio is 32.",
        "Blocks of 32 leave 15.5 slots of a sequence empty (1.6 % of its tokens) and make 32 table entries.",
        "Blocks of 16 would leave 7.5 slots of a sequence empty (0.8 % of its tokens) and make 63 table entries.",
        "Blocks of 64 would leave 31.5 slots of a sequence empty (3.1 % of its tokens) and make 16 table entries.",
    )
    assert "which the limits of 8 and 128 make 128" in advise_block_size(10**6).reasons[0]
    assert "which the limits of 8 and 128 make 8" in advise_block_size(9).reasons[0]


def test_the_waste_is_the_mean_over_all_lengths() -> None:
    lengths = range(1, 16 * 40 + 1)
    waste = sum(-length % 16 for length in lengths) / len(lengths)
    assert advise_block_size(256).expected_waste_tokens == waste == 7.5


def test_a_cache_budget_comes_with_its_reasons() -> None:
    # 1.2 * 50 * 100 = 6,000; 10,000 - 6,000 = 4,000.
    advice = advise_cache_budget(10_000, 50, 100)
    assert (advice.num_blocks, advice.reserved_blocks, advice.missing_blocks) == (4_000, 6_000, 0)
    assert advice.reasons == (
        "50 requests of 100 blocks hold 5000 blocks at once.",
        "A fifth more, 6000 in all, lets them grow before blocks are evicted.",
        "Of 10000 blocks 10000 - 6000 = 4000 (40.0 %) are left for cached prefixes.",
    )
    # 1.2 * 3 * 1 = 3.6 is rounded up: 4 blocks are held back.
    assert advise_cache_budget(10, 3, 1).num_blocks == 6


def test_a_budget_is_never_negative() -> None:
    advice = advise_cache_budget(100, 10, 10)
    assert (advice.num_blocks, advice.missing_blocks) == (0, 20)
    assert "20 too few" in advice.reasons[2]
    assert advise_cache_budget(0, 0, 0).num_blocks == 0


@pytest.mark.parametrize("bad", [0, -5, "100", True, None, float("inf"), float("nan")])
def test_a_bad_mean_is_refused(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="mean_sequence_tokens is"):
        advise_block_size(bad)


def test_bad_budgets_are_refused() -> None:
    for name in ("total_blocks", "concurrent_requests", "blocks_per_request"):
        with pytest.raises(InvalidArgument, match=f"{name} is -1"):
            advise_cache_budget(**{"total_blocks": 1, "concurrent_requests": 1, "blocks_per_request": 1, name: -1})


# ---------------------------------------------------------------- against real tensors


def test_tensors_have_exactly_these_bytes() -> None:
    torch = pytest.importorskip("torch")
    from blockyard.storage import KVCache

    rng = random.Random(run_seed())
    for _ in range(40):
        heads, layers, head_size = rng.randint(1, 4), rng.randint(1, 5), rng.choice([4, 8, 10])
        config = {"model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": 2 * heads}
        config["num_key_value_heads"] = heads
        dtype, block_size, num_blocks = rng.choice(["float32", "float16"]), rng.choice([1, 4, 16]), rng.randint(2, 9)
        spec = KVCacheSpec.from_config({**config, "head_dim": head_size}, dtype=dtype, block_size=block_size)
        cache = KVCache(num_blocks, block_size, layers, heads, head_size, dtype=getattr(torch, dtype))
        assert cache.data.untyped_storage().nbytes() == spec.bytes_per_block * num_blocks == cache.num_bytes
        assert cache.spec.bytes_per_token == spec.bytes_per_token


def test_a_real_models_cache_has_these_bytes() -> None:
    """transformers' own cache, filled by a small model, holds bytes_per_token for every token."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=48, num_attention_heads=6, num_key_value_heads=2, intermediate_size=32,
        vocab_size=50, dtype="float32",
    )  # fmt: skip
    with torch.no_grad():
        filled = transformers.LlamaForCausalLM(config)(torch.arange(11)[None]).past_key_values
    kept = sum(t.numel() * t.element_size() for layer in filled.layers for t in (layer.keys, layer.values))
    assert kept == 11 * KVCacheSpec.from_config(config).bytes_per_token


def test_sizing_needs_nothing_from_outside() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_DIR.parent)!r})\n"
        "import blockyard.sizing\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
