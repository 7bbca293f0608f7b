"""Replays through the real manager: their counts, compared with counts by hand and with slow references."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard.core.policies import POLICIES
from blockyard_lab import TraceError, TraceRequest
from blockyard_lab.replay import ReplayOptions
from blockyard_lab.replay import replay as run_replay
from blockyard_lab.replay.expansion import FIRST_OUTPUT_TOKEN, Expansion
from blockyard_lab.replay.timed import ServiceModel
from blockyard_lab.traces import make_trace, open_trace
from blockyard_testing.lab_reference import ListedTrace, leading, lengths, named, prefix_trace


def quick(num_blocks: int, **others: object) -> ReplayOptions:
    return ReplayOptions(**{"num_blocks": num_blocks, "max_model_len": 4096, **others})  # type: ignore[arg-type]


# ---------------------------------------------------------------- tokens


def test_tokens_are_equal_exactly_where_ids_are() -> None:
    trace = named([[0, 1], [0, 2], [2**59 + 7, 2**59 + 8]])
    expansion = Expansion(trace)
    first, second, third = (expansion.prompt(request).tolist() for request in trace)
    assert first[:16] == second[:16]
    assert len({tuple(row) for row in (first[16:], second[16:], third[:16], third[16:])}) == 4
    assert max(first + second + third) < FIRST_OUTPUT_TOKEN


@pytest.mark.parametrize("size", [1, 2, 3, 512])
def test_a_prompt_is_as_long_as_it_says(size: int) -> None:
    request = TraceRequest(0.0, 2 * size + 1, 3, np.array([4, 5, 6], np.int64))
    expansion = Expansion(ListedTrace([request], size))
    assert len(expansion.prompt(request)) == 2 * size + 1
    assert len(expansion.output(request)) == 3
    assert expansion.output(request).min() >= FIRST_OUTPUT_TOKEN


def test_prompts_without_contents_are_like_no_other() -> None:
    trace = lengths([(32, 1)] * 3)
    expansion = Expansion(trace)
    assert len({tuple(expansion.prompt(request).tolist()) for request in trace}) == 3


def test_an_id_that_is_not_a_token_is_refused() -> None:
    request = TraceRequest(0.0, 1, 1, np.array([2**31], np.int64))
    with pytest.raises(TraceError, match=r"2147483648.*one token"):
        Expansion(ListedTrace([request], 1)).prompt(request)


# ---------------------------------------------------------------- one after another


def test_result_counts_match_a_small_trace() -> None:
    """Prompts of a token less than three blocks: the second repeats the first, the third only its first block."""
    trace = ListedTrace(
        [TraceRequest(0.0, 47, 2, np.array(ids, np.int64)) for ids in ([1, 2, 3], [1, 2, 3], [1, 9, 10])]
    )
    found = run_replay(trace, quick(100))
    assert (found.num_requests, found.num_refused) == (3, 0)
    assert (found.num_prompt_tokens, found.num_output_tokens) == (141, 6)
    assert found.num_hit_tokens == 32 + 16
    assert found.misses is not None
    assert (found.misses.never_seen, found.misses.evicted, found.misses.tail) == (32 + 16, 0, 3 * 15)
    assert found.num_blocks_handled == 3 * 4
    assert found.peak_used_blocks == 4
    assert found.wasted_share == pytest.approx(1 - 49 / 64)
    assert found.seconds == 0.0


def test_evicted_and_never_seen_prefixes_are_distinguished() -> None:
    trace = named([[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    found = run_replay(trace, quick(6))
    assert found.num_hit_tokens == 16  # of 1, 2, 3 the suffix went first
    assert found.misses is not None
    assert (found.misses.never_seen, found.misses.evicted, found.misses.tail) == (64, 16, 48)


def test_causes_and_hits_add_up() -> None:
    trace = make_trace("mix", requests=200, seed=4)
    for num_blocks in (900, 3000, 100_000):
        found = run_replay(trace, quick(num_blocks, max_model_len=100_000))
        misses = found.misses
        assert misses is not None
        assert misses.never_seen + misses.evicted + misses.tail + found.num_hit_tokens == found.num_prompt_tokens
    assert misses.evicted == 0
    assert found.num_evicted_blocks == 0


@pytest.mark.parametrize("block_size", [1, 4, 16, 32, 64])
def test_unlimited_pool_hits_every_earlier_prefix(block_size: int) -> None:
    requests = prefix_trace(5, 40)
    found = run_replay(named(requests, size=32), quick(50_000, block_size=block_size))
    known: set[int] = set()
    expected = 0
    for request in requests:
        shared = 32 * sum(1 for _ in leading(request, frozenset(known)))
        expected += min(shared, 32 * len(request) - 1) // block_size * block_size
        known.update(request)
    assert found.num_hit_tokens == expected
    assert found.misses is not None
    assert found.misses.evicted == 0


def test_token_ids_are_used_unchanged() -> None:
    tokens = np.arange(40, dtype=np.int32)
    requests = [TraceRequest(0.0, 40, 1, None, tokens), TraceRequest(1.0, 40, 1, None, tokens)]
    found = run_replay(ListedTrace(requests, 0), quick(100))
    assert found.num_hit_tokens == 32
    assert found.misses is not None
    assert found.misses.never_seen == 32


def test_causes_can_be_turned_off() -> None:
    assert run_replay(named([[1]]), quick(10, find_causes=False)).misses is None


def test_request_that_never_fits_is_counted() -> None:
    trace = named([[1], [1, 2, 3, 4, 5], [1]])
    found = run_replay(trace, quick(5))
    assert (found.num_requests, found.num_refused) == (2, 1)
    assert "request 2" in found.first_refused
    assert "6 blocks" in found.first_refused
    assert found.num_prompt_tokens == 32
    with pytest.raises(TraceError, match="request 2: it needs 6 blocks"):
        run_replay(trace, quick(5, strict=True))
    with pytest.raises(TraceError, match="request 2: it has 81 tokens"):
        run_replay(trace, quick(50, strict=True, max_model_len=40))


def test_progress_and_clock_are_the_callers() -> None:
    seen: list[int] = []
    ticks = iter([10.0, 12.5])
    found = run_replay(named([[1]] * 600), quick(10), on_request=seen.append, clock=lambda: next(ticks))
    assert seen == [256, 512]
    assert found.seconds == 2.5
    assert found.blocks_per_second == found.num_blocks_handled / 2.5


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_replays(policy: str) -> None:
    trace = make_trace("chat", requests=150, seed=2)
    found = run_replay(trace, quick(1500, policy=policy, max_model_len=100_000))
    everything = run_replay(trace, quick(100_000, policy=policy, max_model_len=100_000))
    assert 0 < found.num_hit_tokens <= everything.num_hit_tokens
    assert found.num_evicted_blocks > 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 1),
        ("block_size", 0),
        ("policy", "lur"),
        ("max_num_seqs", 0),
        ("find_causes", 1),
        ("strict", "no"),
    ],
)
def test_invalid_options_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"policies|" + field):
        replace(quick(10), **{field: value})


# ---------------------------------------------------------------- by timestamps

SECOND_A_STEP = ServiceModel(
    seconds_per_step=1.0, seconds_per_prompt_token=0.0, seconds_per_decode=0.0, seconds_per_context_token=0.0
)


def timed(trace: ListedTrace, num_blocks: int, service: ServiceModel = SECOND_A_STEP, **others: object):
    found = run_replay(trace, quick(num_blocks, service=service, **others))
    assert found.simulated is not None
    return found, found.simulated


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_further_token() -> None:
    found, simulated = timed(named([[1, 2]], output=5), 10)
    assert (simulated.num_steps, simulated.duration) == (5, 5.0)
    assert simulated.first_token == (1.0, 1.0, 1.0)
    assert simulated.queueing == (0.0, 0.0, 0.0)
    assert (found.num_requests, found.num_output_tokens) == (1, 5)


def test_a_prompt_is_cut_where_the_budget_ends() -> None:
    service = replace(SECOND_A_STEP, max_num_batched_tokens=16)
    _, simulated = timed(named([[1, 2, 3]], output=1), 10, service)
    assert simulated.num_steps == 3


def test_requests_run_together_and_idle_time_passes() -> None:
    _, simulated = timed(named([[1], [2], [3]], output=4, every=0.5), 20)
    assert simulated.duration == 5.0  # at 1 both others are there, and take four steps
    _, simulated = timed(named([[1], [2]], output=1, every=100.0), 20)
    assert (simulated.num_steps, simulated.duration) == (2, 101.0)


def test_step_time_adds_up() -> None:
    service = ServiceModel(1.0, 0.5, 0.25, 0.125)
    assert service.step_seconds(10, 4, 100) == 1.0 + 5.0 + 1.0 + 12.5
    _, simulated = timed(named([[1]], output=2), 10, service)
    assert simulated.duration == (1.0 + 8.0) + (1.0 + 0.25 + 17 * 0.125)


def test_each_prompt_token_attends_to_those_before_it() -> None:
    service = replace(SECOND_A_STEP, seconds_per_attention=0.5, max_num_batched_tokens=16)
    _, simulated = timed(named([[1, 2]], output=1), 10, service)
    assert simulated.duration == 2.0 + 0.5 * 32 * 32 / 2
    assert service.prompt_seconds(16, 32) == 0.5 * (32 * 32 - 16 * 16) / 2


def test_speedup_brings_arrivals_closer() -> None:
    trace = named([[1], [2]], output=1, every=10.0)
    _, simulated = timed(trace, 20, replace(SECOND_A_STEP, speedup=10.0))
    assert simulated.duration == 2.0


def test_if_blocks_run_short_the_youngest_is_preempted() -> None:
    """Two requests of two blocks that grow to four each, in a pool of six."""
    trace = named([[1, 2], [3, 4]], output=30, every=0.0)
    found, _ = timed(trace, 7)
    assert found.num_preemptions >= 1
    assert found.num_requests == 2
    assert found.num_output_tokens == 60
    assert found.num_prompt_tokens == 64
    assert found.num_recomputed_tokens > 0
    assert found.peak_running == 2
    plenty, _ = timed(trace, 20)
    assert plenty.num_preemptions == plenty.num_recomputed_tokens == 0


def test_requests_wait_while_the_batch_is_full() -> None:
    trace = named([[1], [2], [3]], output=3, every=0.0)
    found, simulated = timed(trace, 50, max_num_seqs=1)
    assert found.peak_running == 1
    assert simulated.duration == 9.0
    assert simulated.queueing[0] == 3.0


def test_requests_of_one_moment_share_what_is_being_computed() -> None:
    found, _ = timed(named([[1, 2, 3]] * 4, output=2, every=0.0), 50)
    assert found.num_hit_tokens == 3 * 32


@pytest.mark.parametrize("seed", range(5))
def test_every_request_ends_under_memory_pressure(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace = ListedTrace(
        [
            TraceRequest(float(i) / 4, 16 * len(ids) - 3, int(rng.integers(1, 40)), np.array(ids, np.int64))
            for i, ids in enumerate(prefix_trace(seed, 80))
        ]
    )
    service = replace(SECOND_A_STEP, max_num_batched_tokens=24)
    found, _ = timed(trace, 12, service, max_num_seqs=6)
    assert found.num_requests + found.num_refused == 80
    assert found.num_requests > 40
    assert found.num_preemptions > 0
    assert found.misses is not None
    assert found.misses.never_seen + found.misses.evicted + found.misses.tail + found.num_hit_tokens == (
        found.num_prompt_tokens
    )


def test_trace_of_lengths_can_be_replayed() -> None:
    found, _ = timed(lengths([(100, 20), (50, 10)] * 10), 40)
    assert found.num_hit_tokens == 0
    assert found.num_requests == 20


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds_per_step", -1.0),
        ("seconds_per_decode", float("nan")),
        ("max_num_batched_tokens", 0),
        ("speedup", 0.0),
        ("speedup", float("inf")),
    ],
)
def test_invalid_service_models_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=field):
        replace(SECOND_A_STEP, **{field: value})


# ---------------------------------------------------------------- vLLM's own figures


@pytest.mark.skipif("MOONCAKE_TRACE" not in os.environ, reason="MOONCAKE_TRACE names no file")
@pytest.mark.parametrize(("num_blocks", "hits"), [(10_000, 796_160), (100_000, 1_361_584), (1_000_000, 5_663_872)])
def test_token_hits_equal_vllms_pool(num_blocks: int, hits: int) -> None:
    trace = open_trace(Path(os.environ["MOONCAKE_TRACE"]), max_requests=1500)
    options = ReplayOptions(num_blocks, max_model_len=2**17, find_causes=False)
    assert run_replay(trace, options, clock=time.perf_counter).num_hit_tokens == hits
