"""Prompts for engines with unusual layers: answers must be equal on hits, and for preempted sequences."""

from __future__ import annotations

from typing import Any

from blockyard_engine import Engine, SamplingParams
from blockyard_testing.tiny_models import mixed_prompts, reference_tokens, tokens_of

NUM_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)


def few_prompts() -> list[list[int]]:
    """Return prompts longer than every number in the configs; the first three share a prefix."""
    first, other = mixed_prompts((75, 40))
    return [first, first[:41] + other[:20], first[:62] + other[:3], other]


def answer(engine: Engine, prompts: list[list[int]], sampling: SamplingParams = GREEDY) -> list[list[int]]:
    tokens = tokens_of(engine.generate(prompts, sampling))
    engine.cache.check()
    assert engine.cache.num_used_blocks == 0
    return tokens


def require_preempted_alike(model: Any, engine: Engine) -> None:
    """Compare answers of an engine with too few blocks for four sequences."""
    prompts = mixed_prompts((30, 33, 26, 29))
    assert answer(engine, prompts, SamplingParams(max_tokens=20, ignore_eos=True)) == reference_tokens(
        model, prompts, 20
    )
    assert engine.num_preemptions > 0
