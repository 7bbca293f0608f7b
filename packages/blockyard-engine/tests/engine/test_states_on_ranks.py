"""Hybrid models on several ranks: keys and values are divided, and every rank has every state."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from blockyard import InvalidArgument
from blockyard_engine import Engine, ModelError, SamplingParams
from blockyard_engine.handoff import PrefillConnector
from blockyard_engine.model import quiet_transformers
from blockyard_engine.ranks import group
from blockyard_testing.hybrid_models import hybrid_model
from blockyard_testing.thread_ranks import ThreadPeers
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(group, "STEP_SECONDS", 60)
    with quiet_transformers():
        yield


def require_answers(name: str, way: str, size: int, **options: Any) -> Engine:
    """Compare answers, cold and from checkpoints, beside preemption; every rank must have the same states."""
    model = hybrid_model(name)
    first, other = mixed_prompts((75, 40))
    prompts = [first, first[:41] + other[:20], first[:62] + other[:3], other]
    expected = reference_tokens(model, prompts, NUM_TOKENS)
    peers = ThreadPeers(size)
    given = {"num_blocks": 400, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 24, way: peers}
    engine = Engine(model, **{**given, **options})
    for _ in range(2):
        assert tokens_of(engine.generate(prompts, GREEDY)) == expected
        engine.cache.check()
        assert engine.cache.num_used_blocks == 0
    runner: Any = engine._runner
    slots = runner._runner.slots
    engine.close()
    peers.require_ended()  # all have carried out the last step
    for follower in peers.followers:
        for slot in range(3):
            torch.testing.assert_close(
                slots.views(slots._rows[slot : slot + 1]),
                follower.slots.views(follower.slots._rows[slot : slot + 1]),
                atol=1e-3,
                rtol=1e-3,
            )
    assert engine.cache.stats().num_hit_tokens > 4 * 32
    return engine


@pytest.mark.parametrize(
    ("name", "size", "interleave"),
    [("qwen3_next", 2, 1), ("falcon_h1", 2, 4), ("jamba", 3, 2), ("kimi_linear", 2, 2), ("zamba2", 2, 1)],
)
def test_context_parallel_agrees_with_generate(name: str, size: int, interleave: int) -> None:
    engine = require_answers(name, "context_parallel", size, context_interleave=interleave)
    assert engine.cache.config.hit_alignment == 4 * size


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
def test_tensor_parallel_agrees_with_generate(name: str) -> None:
    require_answers(name, "tensor_parallel", 2)


@pytest.mark.parametrize("way", ["context_parallel", "tensor_parallel"])
def test_preempted_and_swapped_sequences_get_the_same_tokens(way: str) -> None:
    model = hybrid_model("qwen3_next")
    prompts = mixed_prompts((30, 33, 26, 29))
    sampling = SamplingParams(max_tokens=20, n=1, ignore_eos=True)
    peers = ThreadPeers(2)
    blocks = {"context_parallel": 24, "tensor_parallel": 40}[way]
    options: dict[str, Any] = {"block_size": 4, "max_num_seqs": 4, "preemption": "swap", way: peers}
    engine = Engine(model, num_blocks=blocks, num_cpu_blocks=60, **options)
    assert tokens_of(engine.generate(prompts, sampling)) == reference_tokens(model, prompts, 20)
    assert engine.num_preemptions > 0
    with pytest.raises(InvalidArgument, match="engine has 2 ranks; a connector needs an engine with 1"):
        PrefillConnector(engine, "prefill", 1, 10)
    forked = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
    (result,) = engine.generate(prompts[:1], forked)
    assert [each.token_ids for each in result.completions] == reference_tokens(model, prompts[:1], 12) * 2
    engine.close()
    peers.require_ended()


def test_heads_that_do_not_divide_are_refused() -> None:
    """A state would take more blocks on the rank with fewer heads; its first step used to be refused."""
    peers = ThreadPeers(2)
    model = hybrid_model("qwen3_next", num_attention_heads=6, num_key_value_heads=3)
    with pytest.raises(InvalidArgument, match="tensor_parallel is 2 for a hybrid model of 3 KV heads; it must divide"):
        Engine(model, num_blocks=400, block_size=4, tensor_parallel=peers)
    peers.require_ended()


def test_a_model_without_a_plan_is_refused_by_its_field() -> None:
    peers = ThreadPeers(2)
    with pytest.raises(
        ModelError, match="FalconH1ForCausalLM cannot be split over ranks: its config has no base_model"
    ):
        Engine(hybrid_model("falcon_h1"), num_blocks=400, block_size=4, tensor_parallel=peers)
    peers.require_ended()
