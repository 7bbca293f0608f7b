"""Latencies under GET /metrics: counted for each completion, by a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard.engine import PromptLookup, SamplingParams
from blockyard.engine.prompts import EncodedPrompt
from blockyard.serving import EngineThread
from blockyard.serving.jobs.job import Job, Mailbox

from ..support.byte_tokenizer import NUM_TOKENS
from ..support.servers import MODEL, tiny_engine
from ..support.stepped_clock import SteppedClock


def samples_after(prompts: Iterable[list[int]], seconds_a_step: float = 1.0, **options: Any) -> dict[str, float]:
    """The samples that requests leave, by name and `le`, where every step takes the same time and nothing else does."""
    sampling = SamplingParams(ignore_eos=True, **options.pop("sampling"))
    engine, clock = tiny_engine(**options), SteppedClock()
    clock.tick_each_step(engine, seconds_a_step)
    thread = EngineThread(engine, 100, MODEL, clock=clock)

    async def run_all() -> None:
        mailbox = Mailbox()
        jobs = [
            Job(EncodedPrompt(prompt, NUM_TOKENS), sampling, 0, number, mailbox, clock())
            for number, prompt in enumerate(prompts)
        ]
        thread.submit(jobs)
        while not all(job.is_over for job in jobs):
            await mailbox.take()

    thread.start()
    try:
        asyncio.run(asyncio.wait_for(run_all(), 60))
    finally:
        assert thread.stop(60)
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for family in thread.request_figures.registry.collect()
        for sample in family.samples
    }


def test_intervals_are_those_of_each_completion() -> None:
    """With n=3 a step gives three tokens; none of them follows another of the same step."""
    found = samples_after([[1, 2, 3]], sampling={"n": 3, "max_tokens": 5})
    assert found["vllm:generation_tokens_total"] == 15
    assert found["vllm:inter_token_latency_seconds_count"] == 3 * 4
    assert found["vllm:inter_token_latency_seconds_sum"] == 3 * 4 * 1.0
    assert found["vllm:inter_token_latency_seconds_bucket0.5"] == 0, "every interval is a whole step"
    assert found["vllm:inter_token_latency_seconds_bucket1.0"] == 12
    assert found["vllm:time_to_first_token_seconds_count"] == 1
    assert found["vllm:time_to_first_token_seconds_sum"] == 1.0


def test_tokens_that_speculation_gives_at_once_share_the_step() -> None:
    """As many intervals as tokens but one, and their sum is the time from the first token to the last."""
    found = samples_after(
        [[1, 2, 3] * 5], sampling={"max_tokens": 40}, speculation=PromptLookup(num_tokens=4, max_ngram=2)
    )
    assert found["vllm:inter_token_latency_seconds_count"] == 39
    assert found["vllm:inter_token_latency_seconds_sum"] < 39, "some steps gave more than one token"
    whole = found["vllm:e2e_request_latency_seconds_sum"]
    first = found["vllm:time_to_first_token_seconds_sum"]
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(whole - first)
