"""Reasons for waiting: no room, or another request that computes the same prefix."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from blockyard_engine import Engine, SamplingParams
from blockyard_testing.tiny_models import tiny_model

PROMPT = list(range(24))


def stepped_once(*prompts: list[int], **options: Any) -> Engine:
    engine = Engine(tiny_model("llama-gqa"), num_blocks=40, block_size=4, max_num_batched_tokens=64, **options)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    engine.step()
    return engine


def test_an_equal_prompt_is_deferred_until_the_first_is_computed() -> None:
    """A cache with a CPU pool shares blocks once they are computed."""
    engine = stepped_once(PROMPT, PROMPT, PROMPT[:8], num_cpu_blocks=8, max_num_seqs=4)
    assert (engine.num_running, engine.num_waiting, engine.num_deferred) == (1, 2, 2)
    engine.step()
    assert (engine.num_running, engine.num_waiting, engine.num_deferred) == (3, 0, 0)


def test_a_request_without_a_row_waits_for_room() -> None:
    engine = stepped_once(PROMPT, PROMPT[::-1], num_cpu_blocks=8, max_num_seqs=1)
    assert (engine.num_running, engine.num_waiting, engine.num_deferred) == (1, 1, 0)


def test_a_deferred_request_that_is_dropped_waits_no_longer() -> None:
    engine = stepped_once(PROMPT, PROMPT, num_cpu_blocks=8, max_num_seqs=4)
    assert engine.num_deferred == 1
    engine.abort_request(2)
    assert engine.num_deferred == 0
