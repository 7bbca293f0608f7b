"""The default number of blocks, on a device of a given size whose use is measured on the CPU."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.sizing import KVCacheSpec
from blockyard_engine import Engine, PromptLookup, SamplingParams, components
from blockyard_engine.memory import account, pool_sizing
from blockyard_engine.memory.account import CPU_KV_BYTES, EngineMemory, weights_bytes
from blockyard_engine.memory.pool_sizing import DeviceUse, meter_of
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

from ..support.memory_meter import CpuMeter, peak_of

MIB = 2**20


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let engines find a device of a given size."""

    def use(total_bytes: int, model: Any, outside_bytes: int = 0) -> Any:
        meter = CpuMeter(total_bytes, weights_bytes(model), outside_bytes)
        monkeypatch.setattr(components, "meter_of", lambda _: meter)
        return model

    return use


def rest_of(memory: EngineMemory) -> int:
    """Return the memory available for blocks at a utilization of 1."""
    assert memory.total_bytes is not None
    assert memory.step_bytes is not None
    assert memory.outside_bytes is not None
    return memory.total_bytes - memory.weights_bytes - memory.step_bytes - memory.outside_bytes


# ---------------------------------------------------------------- on a device whose memory is asked


@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3", "mistral-window"])
def test_the_blocks_are_what_the_step_leaves(shape: str, device: Any) -> None:
    model = device(64 * MIB, tiny_model(shape), outside_bytes=3 * MIB)
    engine = Engine(model, max_num_seqs=8, max_num_batched_tokens=128, gpu_memory_utilization=0.8)
    memory = engine.memory
    assert memory.weights_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert memory.outside_bytes == 3 * MIB
    assert memory.kv_bytes == engine.kv_cache.num_bytes
    usable = int(64 * MIB * 0.8) - (64 * MIB - rest_of(memory))
    assert engine.cache.config.num_blocks == usable // engine.kv_cache.bytes_per_block
    assert memory.left_bytes == rest_of(memory) - memory.kv_bytes
    assert 0 <= memory.left_bytes - 64 * MIB * 0.2 < engine.kv_cache.bytes_per_block + 1
    assert "largest step" in str(memory)


@pytest.mark.parametrize("shape", ["llama-gqa", "gemma3"])
def test_no_step_takes_more_than_the_largest(shape: str, device: Any) -> None:
    """Full batches, long prompts in chunks after hits, and drafts, on an engine that is measured while it runs."""
    sizes: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "speculation": PromptLookup()}
    model = device(256 * MIB, tiny_model(shape))
    found = Engine(model, **sizes).memory.step_bytes
    kv_bytes = []

    def serve() -> None:
        engine = Engine(model, num_blocks=300, **sizes)
        kv_bytes.append(engine.kv_cache.num_bytes)
        prompts = mixed_prompts((480, 470, 200, 96, 30, 7), shared=64)
        engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0.8, logprobs=5, repetition_penalty=1.1))

    taken = peak_of(serve) - kv_bytes[0]
    assert found is not None
    assert 0.8 * found < taken <= found


def test_a_larger_step_leaves_fewer_blocks(device: Any) -> None:
    def step_bytes(**sizes: Any) -> int:
        model = device(128 * MIB, tiny_model("llama-gqa", vocab_size=5000))
        step = Engine(model, **sizes).memory.step_bytes
        assert step is not None
        return step

    buffer = 2**14 * 2 * 2 * 8 * 4  # of SDPA: tokens, keys and values, heads, their size, float32
    small = step_bytes(max_num_seqs=2, max_num_batched_tokens=64)
    assert step_bytes(max_num_seqs=2, max_num_batched_tokens=512) > small > buffer
    assert step_bytes(max_num_seqs=64, max_num_batched_tokens=64) > buffer + 64 * 5000 * 4  # logits
    drafted = step_bytes(max_num_seqs=2, max_num_batched_tokens=64, speculation=PromptLookup(num_tokens=30))
    assert drafted > buffer + 62 * 5000 * 4


def test_buffers_are_as_long_as_the_longest_sequence(device: Any) -> None:
    """SDPA gathers into a buffer of at least 16,384 tokens; a longer context needs a longer one."""
    model = device(256 * MIB, tiny_model("llama-mqa", max_position_embeddings=2**17))
    steps = [
        Engine(model, max_model_len=length, max_num_seqs=1, max_num_batched_tokens=1).memory.step_bytes
        for length in (2**14, 2**16)
    ]
    head_size = 8
    assert None not in steps
    assert steps[1] - steps[0] >= (2**16 - 2**14) * 2 * head_size * 4


@pytest.mark.parametrize("shape", ["llama-gqa", "mistral-window"])
def test_an_engine_that_found_its_memory_gives_the_same_tokens(shape: str, device: Any) -> None:
    prompts = mixed_prompts((33, 5, 40, 64), shared=20)
    model = device(32 * MIB, tiny_model(shape))
    engine = Engine(model, max_num_seqs=4, max_num_batched_tokens=64)
    got = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert tokens_of(got) == reference_tokens(model, prompts, 12)
    engine.cache.check()


def test_too_small_a_device_is_refused_with_the_sum(device: Any) -> None:
    model = device(2 * MIB, tiny_model("llama-gqa"))
    with pytest.raises(InvalidArgument, match=r"GiB; weights take .* no room for two blocks of 6144 bytes"):
        Engine(model, max_num_batched_tokens=512)


def test_a_step_that_the_device_cannot_hold_names_what_makes_it_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def meter(work: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(components, "meter_of", lambda _: meter)
    with pytest.raises(InvalidArgument, match=r"64 tokens \(max_num_batched_tokens\) of 4 sequences \(max_num_seqs\)"):
        Engine(tiny_model("llama-gqa"), max_num_seqs=4, max_num_batched_tokens=64)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, "half", None, True])
def test_gpu_memory_utilization_is_above_0_and_at_most_1(share: Any) -> None:
    with pytest.raises(InvalidArgument, match="gpu_memory_utilization"):
        Engine(tiny_model("llama-gqa"), gpu_memory_utilization=share)


def test_the_counters_of_cuda_are_read_around_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic, with made-up counters; `test_cuda` has the real ones."""
    calls: list[str] = []
    counters = {"memory_allocated": 300, "max_memory_allocated": 750, "memory_reserved": 320}
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", *counters):

        def note(*_: Any, name: str = name) -> int:
            calls.append(name)
            return counters.get(name, 0)

        monkeypatch.setattr(torch.cuda, name, note)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (calls.append("mem_get_info"), (600, 1000))[1])
    meter = meter_of(torch.device("cuda"))
    assert meter is not None
    assert meter(lambda: calls.append("work")) == DeviceUse(1000, 80, 300, 750)
    at = calls.index("work")
    assert calls[:at] == ["synchronize", "empty_cache", "reset_peak_memory_stats", "memory_allocated"]
    assert calls[at + 1 :] == [
        "synchronize",
        "max_memory_allocated",
        "empty_cache",
        "mem_get_info",
        "memory_reserved",
    ]
    assert meter_of(torch.device("cpu")) is None


# ---------------------------------------------------------------- on a CPU, and where blocks are given


def test_a_cpu_takes_at_most_one_gib_for_a_short_context() -> None:
    engine = Engine(tiny_model("llama-gqa"), block_size=256)
    assert CPU_KV_BYTES - engine.kv_cache.bytes_per_block < engine.kv_cache.num_bytes <= CPU_KV_BYTES
    assert engine.memory.kv_bytes == engine.kv_cache.num_bytes
    assert (engine.memory.step_bytes, engine.memory.total_bytes, engine.memory.left_bytes) == (None, None, None)
    assert str(engine.memory) == "memory of cpu, GiB: weights 0.00, keys and values 1.00"


def test_a_cpu_takes_more_than_one_gib_for_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama-gqa")
    monkeypatch.setattr(account, "CPU_KV_BYTES", 20_000)
    monkeypatch.setattr(pool_sizing, "available_bytes", lambda: 2**30)
    engine = Engine(model)
    config = engine.cache.config
    assert config.max_servable_tokens == config.max_model_len
    assert replace(config, num_blocks=config.num_blocks - 1).max_servable_tokens < config.max_model_len
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (result,) = engine.generate([[1] * (config.max_model_len - 2)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(result.token_ids) == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpu_takes_half_of_the_available_memory_and_warns_of_a_short_pool(ranks: int) -> None:
    spec = replace(KVCacheSpec.uniform(4, 8, 64, block_size=16), tensor_parallel_size=ranks)
    config = spec.cache_config(2, max_model_len=131_072)
    num_blocks = account.cpu_blocks(config, spec, 100 * MIB)
    assert num_blocks == 50 * MIB // ranks // spec.bytes_per_block
    config = replace(config, num_blocks=num_blocks)
    fits = config.max_servable_tokens
    with pytest.warns(RuntimeWarning, match=rf"sequence of {fits} tokens at most, and max_model_len is 131072"):
        account.warn_of_short_pool(config)


def test_an_engine_warns_of_a_pool_that_its_context_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_sizing, "available_bytes", lambda: 100_000)
    with pytest.warns(RuntimeWarning, match=r"the pool of 8 blocks holds a sequence of \d+ tokens at most"):
        Engine(tiny_model("llama-gqa"))
    with pytest.warns(RuntimeWarning, match=r"the pool of 8 blocks holds a sequence of \d+ tokens at most"):
        Engine(tiny_model("llama-gqa"), kv_cache_memory_bytes=50_000)


def test_available_memory_is_none_if_the_system_does_not_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "limit"
    monkeypatch.setattr(pool_sizing, "_CONTAINER_LIMITS", (limit,))
    found = pool_sizing.available_bytes()
    if sys.platform == "linux":
        assert found is not None
        assert found > MIB
        limit.write_text("max\n")
        assert pool_sizing.available_bytes() is not None
        limit.write_text("4096\n")
        assert pool_sizing.available_bytes() == 4096
    monkeypatch.setattr(pool_sizing, "_MEMINFO", tmp_path / "nothing")
    assert pool_sizing.available_bytes() is None
    spec = KVCacheSpec.uniform(4, 8, 64, block_size=16)
    config = spec.cache_config(2, max_model_len=131_072)
    assert account.cpu_blocks(config, spec, None) == CPU_KV_BYTES // spec.bytes_per_block


def test_a_pool_can_be_sized_in_bytes() -> None:
    engine = Engine(tiny_model("llama-gqa"), kv_cache_memory_bytes=MIB, max_model_len=64)
    assert engine.cache.config.num_blocks == MIB // engine.kv_cache.bytes_per_block
    assert engine.memory.kv_bytes == engine.kv_cache.num_bytes <= MIB
    assert engine.memory.step_bytes is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory_bytes": 5000}, "5000; a block has 6144 bytes, and .* at least 12288 bytes"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes is 0; it must be from 1 to"),
        ({"kv_cache_memory_bytes": 1.5}, "kv_cache_memory_bytes is 1.5; it must be an integer"),
        ({"kv_cache_memory_bytes": MIB, "num_blocks": 9}, "is 1048576 and num_blocks is 9; both size the same pool"),
    ],
)
def test_invalid_pool_sizes_in_bytes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Engine(tiny_model("llama-gqa"), **options)


def test_given_blocks_are_taken_and_no_step_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "meter_of", lambda _: pytest.fail("the device was asked"))
    engine = Engine(tiny_model("llama-gqa"), num_blocks=50)
    assert engine.cache.config.num_blocks == 50
    assert engine.memory.kv_bytes == engine.kv_cache.num_bytes


# ---------------------------------------------------------------- the CPU pool


def test_swap_space_is_counted_in_blocks() -> None:
    model = tiny_model("llama-gqa")
    engine = Engine(model, num_blocks=20, swap_space_bytes=MIB, preemption="swap")
    assert engine.cache.config.cpu.num_blocks == MIB // engine.kv_cache.bytes_per_block
    assert engine.kv_cache.cpu_data is not None
    assert engine.kv_cache.cpu_data.shape[1] == engine.cache.config.cpu.num_blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space_bytes": 5000}, r"swap_space_bytes is 5000; it must be at least two blocks of 6144 bytes"),
        ({"swap_space_bytes": MIB, "num_cpu_blocks": 9}, "give one"),
        ({"swap_space_bytes": -1}, "swap_space_bytes"),
        ({"swap_space_bytes": "4GiB"}, "swap_space_bytes"),
    ],
)
def test_a_swap_space_below_two_blocks_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Engine(tiny_model("llama-gqa"), num_blocks=20, **options)
