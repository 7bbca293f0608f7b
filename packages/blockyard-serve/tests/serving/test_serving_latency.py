"""Latencies under GET /metrics: counted for each completion, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard_engine import PromptLookup, SamplingParams
from blockyard_serve.jobs.request_metrics import token_bounds
from blockyard_testing.servers import tiny_engine

from ..support.engine_jobs import run_jobs


def samples_after(prompts: list[list[int]], sampling: dict[str, Any], **options: Any) -> dict[str, float]:
    """The samples that requests leave, by name and `le`. A step takes a second. options: of the engine."""
    thread = run_jobs(tiny_engine(**options), prompts, SamplingParams(ignore_eos=True, **sampling))
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for family in thread.request_metrics.collect()
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


def test_queue_prefill_and_decode_follow_one_another() -> None:
    """Two prompts, one at a time, four steps each: the second waits for the first to end."""
    found = samples_after([[1, 2, 3], [4, 5, 6]], sampling={"max_tokens": 4}, max_num_seqs=1, max_num_batched_tokens=8)
    sums = {name: found[f"vllm:request_{name}_seconds_sum"] for name in ("queue_time", "prefill_time", "decode_time")}
    assert sums == {"queue_time": 0 + 4, "prefill_time": 1 + 1, "decode_time": 3 + 3}
    assert found["vllm:request_inference_time_seconds_sum"] == 4 + 4
    assert found["vllm:e2e_request_latency_seconds_sum"] == 4 + 8 == sum(sums.values())
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 1 + 1
    assert found["vllm:request_time_per_output_token_seconds_count"] == 2
    assert found["vllm:iteration_tokens_total_count"] == 8
    assert found["vllm:iteration_tokens_total_sum"] == 2 * (3 + 1 + 1 + 1)


def test_a_prompt_that_takes_several_steps_is_in_prefill_all_the_time() -> None:
    found = samples_after([list(range(40))], sampling={"max_tokens": 2}, max_num_seqs=4, max_num_batched_tokens=10)
    assert found["vllm:request_queue_time_seconds_sum"] == 0
    assert found["vllm:request_prefill_time_seconds_sum"] == 4
    assert found["vllm:request_decode_time_seconds_sum"] == 1


def test_histograms_count_the_sizes_of_requests() -> None:
    found = samples_after([[1, 2, 3] * 20, [1, 2, 3] * 20], sampling={"n": 2, "max_tokens": 5}, max_num_seqs=2)
    assert found["vllm:request_prompt_tokens_sum"] == found["vllm:prompt_tokens_total"] == 120
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 60 + 60 - 48
    assert found["vllm:request_generation_tokens_count"] == 4
    assert found["vllm:request_generation_tokens_sum"] == found["vllm:generation_tokens_total"] == 20
    assert found["vllm:request_max_num_generation_tokens_sum"] == 5 + 5
    assert found["vllm:request_params_n_sum"] == 4
    assert found["vllm:request_params_max_tokens_sum"] == 10


def test_buckets_of_tokens_reach_the_longest_sequence() -> None:
    assert token_bounds(1) == (1,)
    assert token_bounds(700) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert token_bounds(500)[-1] == 500
