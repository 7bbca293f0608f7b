"""Tests that need a GPU: real paged kernels compared with SDPA, block moves on their stream, and whole engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.storage import KVCache, MoveLists
from blockyard_engine import Engine, SamplingParams
from blockyard_engine.attention.backends import BACKENDS
from blockyard_engine.attention.sdpa import SdpaBackend
from blockyard_testing.seeds import run_seed
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tiny_model, tokens_of

from ..support.attention_steps import GROUPS, random_step, run_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PAGED = [backend for backend in BACKENDS if backend is not SdpaBackend]


def skip_unless_it_serves(backend: Any, head_size: int) -> None:
    cache = KVCache(3, 16, 1, 2, head_size, dtype=torch.bfloat16, device="cuda")
    refusal = backend.refusal(cache)
    if refusal is not None:
        pytest.skip(f"{backend.name}: {refusal}")


@pytest.mark.parametrize("backend", PAGED, ids=lambda backend: backend.name)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_equals_sdpa(backend: Any, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    """Compared with SDPA in float32 on the CPU, with keys and values rounded alike."""
    skip_unless_it_serves(backend, 64)
    rng = np.random.default_rng(run_seed())
    for _ in range(5):
        step = random_step(rng, num_heads, num_kv_heads, 16, head_size=64).rounded_to(dtype)
        output = run_step(step, backend, device="cuda", dtype=dtype)
        torch.testing.assert_close(output, run_step(step, SdpaBackend), rtol=2e-2, atol=2e-2)


def test_sdpa_on_cuda_equals_sdpa_on_the_cpu() -> None:
    step = random_step(np.random.default_rng(run_seed()), 6, 2, block_size=16, head_size=64)
    torch.testing.assert_close(
        run_step(step, SdpaBackend, device="cuda"), run_step(step, SdpaBackend), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("shape", ["llama-gqa", "mistral-window", "gemma3"])
def test_an_engine_on_cuda_gives_transformers_tokens(shape: str, preemption: str) -> None:
    """In float32, with so few blocks that it preempts; with swap, keys and values move to the CPU pool and back."""
    model = tiny_model(shape).to("cuda")
    prompts = mixed_prompts((33, 5, 40, 1, 64, 50), shared=24)
    expected = [tokens_of([result]) for result in _roomy(model, prompts)]
    engine = Engine(model, num_blocks=48, block_size=8, max_num_seqs=4, num_cpu_blocks=200, preemption=preemption)
    results = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    assert [tokens_of([result]) for result in results] == expected
    engine.cache.check()


def _roomy(model: Any, prompts: list[list[int]]) -> list[Any]:
    engine = Engine(model, num_blocks=400, block_size=8, max_num_seqs=1)
    return engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))


@pytest.mark.parametrize("backend", PAGED, ids=lambda backend: backend.name)
def test_an_engine_on_a_paged_kernel_agrees_with_sdpa(backend: Any) -> None:
    """In half precision a token may differ if two are nearly equally likely; almost all must agree."""
    skip_unless_it_serves(backend, 64)
    sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = tiny_model("llama-gqa", **sizes).to("cuda", torch.bfloat16)
    prompts = mixed_prompts((100, 20, 130, 1), shared=64)
    chosen = []
    for name in (backend.name, "sdpa"):
        options = {"num_blocks": 60, "block_size": 16, "attention_backend": name}
        engine = Engine(model, max_num_batched_tokens=64, **options)
        results = engine.generate(prompts, SamplingParams(max_tokens=1))
        chosen.append(tokens_of(results))
        engine.cache.check()
    assert sum(ours == sdpa for ours, sdpa in zip(*chosen, strict=True)) >= len(prompts) - 1


def test_moves_on_the_stream_are_done_before_a_layer_writes() -> None:
    """Blocks swapped out, overwritten, and swapped in elsewhere keep their contents; nothing waits on the host."""
    cache = KVCache(600, 16, 4, 2, 64, dtype=torch.bfloat16, device="cuda", layer_groups=GROUPS, num_cpu_blocks=600)
    cache.data[:, 1:300] = torch.randn_like(cache.data[:, 1:300])
    before = cache.data[:, 1:300].clone()
    ids = np.arange(1, 300)
    cpu_ids = np.random.default_rng(run_seed()).permutation(ids)
    cache.start_moves(MoveLists(swap_outs=np.stack([ids, cpu_ids], 1)))
    tokens = torch.zeros((299 * 16, 2, 64), dtype=torch.bfloat16, device="cuda")
    for layer in range(4):
        cache.write(layer, tokens, tokens, np.arange(16, 300 * 16))
    cache.start_moves(MoveLists(swap_ins=np.stack([cpu_ids, ids + 299], 1), copies=np.stack([ids + 299, ids], 1)))
    cache.finish_moves()
    torch.testing.assert_close(cache.data[:, 300:599], before, rtol=0, atol=0)
    torch.testing.assert_close(cache.data[:, 1:300], before, rtol=0, atol=0)


def test_greedy_tokens_on_cuda_are_transformers() -> None:
    model = tiny_model("llama-gqa")
    prompts = mixed_prompts((33, 5, 40))
    expected = reference_tokens(model, prompts, 12)
    results = Engine(model.to("cuda"), num_blocks=60).generate(prompts, SamplingParams(max_tokens=12))
    assert tokens_of(results) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_takes_at_most_its_share_of_the_device(dtype: torch.dtype) -> None:
    """It takes the weights, blocks and largest step that it reported; full batches then run within them."""
    model = tiny_model("llama-gqa", head_dim=64, max_position_embeddings=4096).to("cuda", dtype)
    total = torch.cuda.mem_get_info()[1]
    before = torch.cuda.memory_allocated()
    engine = Engine(model, max_num_seqs=8, max_num_batched_tokens=1024, gpu_memory_utilization=0.5)
    memory = engine.memory
    assert memory.total_bytes == total
    assert memory.step_bytes
    assert memory.left_bytes is not None
    assert abs(memory.left_bytes - total // 2) < 2 * engine.kv_cache.bytes_per_block
    torch.cuda.reset_peak_memory_stats()
    prompts = mixed_prompts((4000, 3900, 1500, 700, 30, 7, 64, 1), shared=64)
    engine.generate(prompts, SamplingParams(max_tokens=20, logprobs=5, temperature=0.7))
    taken = torch.cuda.max_memory_allocated() - before - engine.kv_cache.num_bytes
    assert taken <= memory.step_bytes * 1.1  # the allocator rounds, and reuses pieces in another order
    engine.cache.check()


def test_a_full_device_is_refused_with_the_sum() -> None:
    with pytest.raises(InvalidArgument, match="weights take"):
        Engine(tiny_model("llama-gqa").to("cuda"), gpu_memory_utilization=1e-6)
