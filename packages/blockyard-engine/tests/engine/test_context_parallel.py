"""Context parallelism: the tokens of one rank, and each token's keys and values in one slot of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard.storage import ContextShard
from blockyard_engine import Engine, PromptLookup, SamplingParams
from blockyard_engine.ranks import group
from blockyard_testing.thread_ranks import ThreadPeers
from blockyard_testing.tiny_models import (
    SHAPES,
    WINDOWED,
    mixed_prompts,
    reference_tokens,
    tiny_model,
    tokens_of,
)

LENGTHS = (1, 2, 15, 16, 17, 33, 5, 48, 64, 3)
NUM_TOKENS = 6


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STEP_SECONDS", 20)


@pytest.mark.parametrize(
    ("shape", "size", "interleave", "block_size"),
    [
        (shape, 2 + place % 2, (1, 4, 8)[place % 3], (8, 16)[place % 2])
        for place, shape in enumerate(["smollm2", "llama-gqa", "llama-mqa", "phi3", "deepseek-v3", *WINDOWED])
    ],
)
def test_every_shape_agrees_with_generate(shape: str, size: int, interleave: int, block_size: int) -> None:
    assert shape in {**SHAPES, **WINDOWED}
    model = tiny_model(shape)
    prompts = mixed_prompts(LENGTHS, shared=20)
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    peers = ThreadPeers(size)
    engine = Engine(
        model,
        num_blocks=60,
        block_size=block_size,
        max_num_seqs=5,
        max_num_batched_tokens=64,
        context_parallel=peers,
        context_interleave=interleave,
    )
    assert tokens_of(engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))) == expected
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    if shape in SHAPES:
        assert engine.cache.block_size == block_size * size
    assert engine.kv_cache.block_size == peers.followers[0].kv_cache.block_size == block_size
    engine.close()
    peers.require_ended()


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_keeps_its_part_of_a_single_ranks_tokens(size: int) -> None:
    """With forks, swaps, preemption, a CPU pool and drafts, every slot of every rank has the bytes of its token."""
    model = tiny_model("llama-gqa")
    prompts = mixed_prompts((33, 37, 31, 42, 29), shared=16)
    options: dict[str, Any] = {
        "num_blocks": {2: 18, 3: 13}[size],
        "num_cpu_blocks": 14,
        "preemption": "swap",
        "max_num_seqs": 4,
    }
    options |= {"cache_options": {"hash_seed": 5}, "speculation": PromptLookup(), "max_num_batched_tokens": 64}
    sampling = [SamplingParams(max_tokens=20, n=n, temperature=0.7, seed=3, ignore_eos=True) for n in (1, 2, 1, 2, 1)]
    alone = Engine(model, block_size=4 * size, **options)
    expected = alone.generate(prompts, sampling)
    peers = ThreadPeers(size)
    engine = Engine(model, block_size=4, context_parallel=peers, context_interleave=2, **options)
    results = engine.generate(prompts, sampling)
    assert [[each.token_ids for each in result.completions] for result in results] == [
        [each.token_ids for each in result.completions] for result in expected
    ]
    assert engine.num_preemptions == alone.num_preemptions > 0
    engine.close()
    peers.require_ended()
    slots = np.arange(4 * size, alone.kv_cache.num_blocks * 4 * size)
    for rank, cache in enumerate([engine.kv_cache, *(follower.kv_cache for follower in peers.followers)]):
        shard = ContextShard(rank, size, 2)
        own = torch.from_numpy(slots[shard.is_own(slots)])
        local = torch.from_numpy(shard.local_slots(own.numpy()))
        for layer in range(cache.num_layers):
            for part, whole in (
                (cache.key_cache(layer), alone.kv_cache.key_cache(layer)),
                (cache.value_cache(layer), alone.kv_cache.value_cache(layer)),
            ):
                torch.testing.assert_close(part.flatten(0, 1)[local], whole.flatten(0, 1)[own], atol=2e-3, rtol=1e-3)


def test_contradicting_options_are_refused() -> None:
    model = tiny_model("llama-gqa")
    with pytest.raises(InvalidArgument, match="tensor_parallel is 2 and context_parallel is 3; one of them must be 1"):
        Engine(model, tensor_parallel=2, context_parallel=3)
    with pytest.raises(InvalidArgument, match="context_parallel is 0"):
        Engine(model, context_parallel=0)
    with pytest.raises(InvalidArgument, match="interleave is 0"):
        Engine(model, context_interleave=0)
    peers = ThreadPeers(2)
    with pytest.raises(InvalidArgument, match=r"must be a multiple of shards \* interleave, 2 \* 3"):
        Engine(model, num_blocks=40, block_size=16, context_parallel=peers, context_interleave=3)
    assert peers.threads == [], "it is said before any rank is asked"
