"""Closed loops on the simulated engine: times by hand, hits against the detailed replay, bounds, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard_lab import TraceRequest, UnknownContents
from blockyard_lab.closed import LoopOptions, SessionLoad, loops_as_text, read_sessions, run_closed, run_open
from blockyard_lab.replay import ReplayOptions, ServiceModel, replay
from blockyard_lab.replay.timed import DEVICES
from blockyard_lab.traces import make_trace
from blockyard_testing.lab_reference import ListedTrace, lengths

#: A step takes 1 s, and nothing else takes time.
STEPS = ServiceModel(1.0, 0.0, 0.0, 0.0)
SHORT = {"hours": 0.05, "warm_up": 0.01}


def request(length: int, ids: list[int], session: str = "", pause: float | None = None, **others: Any) -> TraceRequest:
    values: dict[str, Any] = {"arrival": 0.0, "num_output_tokens": 4, **others}
    return TraceRequest(
        values["arrival"], length, values["num_output_tokens"], np.array(ids, np.int64), None, session, pause
    )


def load_of(requests: list[TraceRequest], block_size: int = 16) -> SessionLoad:
    return read_sessions(ListedTrace(requests, 16), block_size)


def growing(sessions: int = 6, turns: int = 8) -> SessionLoad:
    """Sessions whose prompts grow by 64 tokens a turn, each after a pause of 20 s."""
    rows, ids = [], iter(range(10**6))
    for session in range(sessions):
        own = [next(ids) for _ in range(4 * turns + 1)]
        for turn in range(1, turns + 1):
            rows.append(request(64 * turn + 1, own[: 4 * turn + 1], f"s{session}", 20.0, num_output_tokens=40))
    return load_of(rows)


# ---------------------------------------------------------------- sessions


def test_turns_have_the_blocks_of_the_trace_in_larger_blocks() -> None:
    rows = [
        request(70, [1, 2, 3, 4, 5], "a"),
        request(129, [1, 2, 3, 4, *range(6, 11)], "a", 3.0),
        request(64, [1, 2, 3, 99], "b"),
    ]
    (first, second), (other,) = load_of(rows).sessions
    assert (first.num_kept, first.num_shared, second.num_kept, other.num_shared) == (0, 3, 4, 3)
    assert first.ids.tolist()[:3] == other.ids.tolist()[:3] == [-1, -2, -3]
    assert first.ids[3] >= 0
    (first, second), (other,) = load_of(rows, 32).sessions
    assert [len(first.ids), len(second.ids), len(other.ids)] == [2, 4, 2]
    assert (first.ids[1] >= 0, second.num_kept, other.num_shared) == (True, 2, 1)


def test_an_answer_has_the_blocks_of_the_next_prompt_if_that_continues_it() -> None:
    rows = [request(32, [1, 2], "a", num_output_tokens=40), request(80, [1, 2, 3, 4, 5], "a"), request(32, [8, 9], "a")]
    first, second, third = load_of(rows).sessions[0]
    assert first.answer[:2] == second.ids.tolist()[2:4]
    assert (second.num_kept, third.num_kept) == (4, 0)
    known = {name for turn in (first, second, third) for name in turn.ids.tolist()}
    assert not known & {first.answer[2], *second.answer, *third.answer}


def test_pauses_are_the_traces_own_or_the_time_between_arrivals() -> None:
    rows = [request(16, [1], "a"), request(16, [1], "a", arrival=7.0), request(16, [1], "a", 900.0, arrival=8.0)]
    assert [turn.pause for turn in load_of(rows).sessions[0]] == [0.0, 7.0, 600.0]


def test_contents_and_block_sizes_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(UnknownContents):
        read_sessions(lengths([(10, 1)]), 16)
    with pytest.raises(InvalidArgument, match=r"block_size is 24.*multiple of 16"):
        load_of([request(16, [1])], 24)
    with pytest.raises(InvalidArgument, match="max_pause is -1"):
        read_sessions(ListedTrace([request(16, [1])]), 16, max_pause=-1.0)


# ---------------------------------------------------------------- times by hand


def test_a_session_alone_takes_its_pauses_a_step_for_each_prompt_and_one_for_each_token() -> None:
    load = load_of([request(32, [1, 2], "a"), request(48, [1, 2, 3], "a", 15.0)])
    found = run_closed([(load, 1)], LoopOptions(100, device=STEPS, warm_up=0.1, hours=1.0))
    assert found.all.turns_per_hour == pytest.approx(2 * 3600 / (2 * (1 + 4) + 15), rel=0.02)
    assert found.all.latency["max"] == pytest.approx(5.0)
    assert (found.all.waiting["max"], found.jain) == (0.0, 1.0)
    # Every session is new: its first turn computes 32 tokens, its second the 16 that the first one left out.
    assert found.hit_rate == pytest.approx(1 - 48 / 80, abs=0.01)


def test_prompts_are_computed_in_chunks_and_attention_takes_its_time() -> None:
    device = ServiceModel(1.0, 0.0, 0.0, 0.0, 0.001, max_num_batched_tokens=100)
    load = load_of([request(256, list(range(16)), num_output_tokens=1)])
    found = run_open(load, LoopOptions(100, device=device))
    assert found.all.latency["max"] == pytest.approx(3 + 1 + 0.001 * 256**2 / 2)
    assert found.num_computed_tokens == 256


def test_requests_wait_in_order_of_arrival_while_the_pool_is_full() -> None:
    rows = [request(480, list(range(n * 30, n * 30 + 30)), arrival=float(n), num_output_tokens=20) for n in range(3)]
    found = run_open(load_of(rows), LoopOptions(61, device=STEPS, watermark=0.0))
    assert found.all.latency["max"] == 3 * (1 + 20) - 2
    assert found.all.waiting["max"] == 2 * (1 + 20) - 2
    found = run_open(load_of(rows), LoopOptions(61, device=replace(STEPS, speedup=0.01)))
    assert found.all.waiting["max"] == 0


def test_turns_above_60_percent_of_the_pool_are_skipped() -> None:
    rows = [request(32, [1, 2], "a"), request(160, list(range(1, 11)), "a"), request(32, [1, 2], "a")]
    found = run_closed([(load_of(rows), 1)], LoopOptions(17, device=STEPS, **SHORT))
    assert found.num_skipped > 0
    assert found.all.latency["max"] == 5.0
    with pytest.raises(InvalidArgument, match=r"num_blocks is 5.*no turn of at most 60%"):
        run_closed([(load_of(rows[1:2]), 1)], LoopOptions(5))


# ---------------------------------------------------------------- against other parts of the lab


def test_requests_that_never_meet_hit_what_the_detailed_replay_hits() -> None:
    chats = make_trace("chat", requests=60, seed=2, rate=0.001, users=8, output_tokens=20, max_prompt_tokens=1500)
    # Without names, answers are part of no later prompt, as in the detailed replay.
    trace = ListedTrace([replace(row, session="") for row in chats], 16)
    found = run_open(read_sessions(trace, 16), LoopOptions(250, watermark=0.0))
    detailed = replay(trace, ReplayOptions(num_blocks=250, service=ServiceModel(), max_num_seqs=64))
    assert detailed.num_refused == found.num_skipped == 0
    assert found.num_prompt_tokens == detailed.num_prompt_tokens
    assert detailed.num_evicted_blocks > 250
    assert 0.2 < found.hit_rate < 0.8
    assert found.hit_rate == pytest.approx(detailed.hit_rate, abs=0.01)


def test_an_overloaded_pool_preempts_and_serves_everybody() -> None:
    rows = [request(33, [n * 3, n * 3 + 1, n * 3 + 2], num_output_tokens=200) for n in range(40)]
    found = run_open(load_of(rows), LoopOptions(40, device=STEPS, watermark=0.0))
    assert found.counters.num_preemptions > 0
    assert found.counters.num_admissions == 40
    assert found.num_computed_tokens > found.num_prompt_tokens == 40 * 33


def test_a_pool_that_sessions_overflow_loses_its_hits_in_order_of_arrival() -> None:
    device = ServiceModel(0.01, 0.02, 0.0, 0.0)
    roomy, tight = (
        run_closed([(growing(), 6)], LoopOptions(blocks, device=device, hours=0.3, warm_up=0.1)) for blocks in (400, 60)
    )
    assert roomy.hit_rate > 0.8 > 0.5 > tight.hit_rate
    assert roomy.all.turns_per_hour > 1.5 * tight.all.turns_per_hour
    assert tight.pools > 1 > roomy.pools
    for found in (roomy, tight):
        assert found.bound_known >= found.bound_aged
        assert found.all.turns_per_hour <= 1.02 * found.bound_known  # the bound is for a long run


def test_bounds_are_those_of_compute_of_memory_and_of_the_sessions() -> None:
    load, device = growing(), ServiceModel(0.01, 0.02, 0.0, 0.0)
    options = LoopOptions(10_000, device=device, **SHORT)
    alone = run_closed([(load, 1)], options)
    # A first turn computes 65 tokens, the others 64 less the two blocks that the answer filled, and the last token.
    compute = [0.02 * 65, *[0.02 * (65 - 32)] * 7]
    turns = sum(compute) + 7 * 20 + 8 * 40 * 0.01
    assert alone.bound_known == pytest.approx(3600 * 8 / turns)
    crowded = run_closed([(load, 64)], options)
    assert crowded.bound_known == pytest.approx(3600 * 8 / sum(compute), rel=0.01)
    tiny = run_closed([(load, 64)], replace(options, num_blocks=60))
    assert tiny.bound_aged <= tiny.bound_known < crowded.bound_known


# ---------------------------------------------------------------- orders of admission


def deep() -> SessionLoad:
    """Sessions of twelve turns that add 16 tokens each to a long context."""
    rows = []
    for session in range(6):
        own = list(range(100 * session, 100 * session + 43))
        for turn in range(12):
            rows.append(request(481 + 16 * turn, own[: 31 + turn], f"s{session}", 5.0, num_output_tokens=10))
    return load_of(rows)


#: Ten of them overflow the pool 1.8 times.
CROWDED = LoopOptions(200, device=ServiceModel(0.01, 0.01, 0.0, 0.0), hours=0.1, warm_up=0.05)


def test_room_serves_twice_the_turns_of_arrival_if_sessions_overflow_the_pool() -> None:
    arrival, fewest, room = (
        run_closed([(deep(), 10)], replace(CROWDED, admission=name)) for name in ("arrival", "fewest", "room")
    )
    assert room.all.turns_per_hour > 2 * arrival.all.turns_per_hour
    assert arrival.hit_rate < fewest.hit_rate < room.hit_rate
    assert room.all.turns_per_hour < room.bound_aged < room.bound_known


@pytest.mark.parametrize("admission", ["fewest:2", "room", "room:8"])
def test_no_request_waits_beyond_the_lanes_bound(admission: str) -> None:
    found = run_closed([(deep(), 12)], replace(CROWDED, admission=admission))
    assert found.counters.num_admissions > 100
    assert found.all.waiting["max"] > 50
    assert (found.counters.num_beyond_lane, found.counters.most_beyond_lane) == (0, 0.0)


def test_all_orders_serve_every_request_of_a_trace() -> None:
    rows = [request(33, [n // 2, n, n + 1], arrival=float(n), num_output_tokens=50) for n in range(30)]
    for admission in ("arrival", "fewest", "room"):
        found = run_open(load_of(rows), LoopOptions(40, admission, device=STEPS))
        assert (found.counters.num_admissions, len(found.groups)) == (30, 0)


# ---------------------------------------------------------------- results


def test_equal_seeds_give_equal_results_and_others_do_not() -> None:
    first, again, other = (
        run_closed([(growing(), 4)], LoopOptions(60, device=DEVICES["8b"], seed=seed, **SHORT)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.all.latency != other.all.latency
    assert json.loads(json.dumps(first.as_dict()))["all"]["turns_per_hour"] == first.all.turns_per_hour


def test_groups_of_sessions_are_counted_apart() -> None:
    batch = load_of([request(160, list(range(n * 10, n * 10 + 10)), "", 0.0, num_output_tokens=300) for n in range(50)])
    found = run_closed([(growing(), 3), (batch, 2)], LoopOptions(60, device=DEVICES["default"], **SHORT))
    assert [group.num_sessions for group in found.groups] == [3, 2]
    assert sum(group.turns_per_hour for group in found.groups) == pytest.approx(found.all.turns_per_hour)
    assert max(group.latency["max"] for group in found.groups) == found.all.latency["max"]
    with pytest.raises(InvalidArgument, match="one block size"):
        run_closed([(growing(), 1), (load_of([request(32, [1, 2])], 32), 1)], LoopOptions(60))


def test_the_table_has_a_row_for_each_number_of_sessions_and_says_what_was_assumed() -> None:
    options = LoopOptions(60, device=DEVICES["70b"], **SHORT)
    runs = [run_closed([(growing(), n)], replace(options, seed=seed)) for n in (2, 4) for seed in (0, 1)]
    lines = loops_as_text(runs).splitlines()
    assert "per_attention 1.46e-09" in lines[0]
    assert "seeds 0, 1" in lines[1]
    assert [line.split()[0] for line in lines[4:]] == ["2", "4"]


def test_unserved_turns_count_with_their_age() -> None:
    slow = ServiceModel(1.0, 0.0, 0.0, 0.0)
    load = load_of([request(160, list(range(10)), "a", 0.0, num_output_tokens=10_000)])
    found = run_closed([(load, 3)], LoopOptions(1100, device=slow, max_num_seqs=1, warm_up=0.0, hours=0.5))
    assert found.all.num_unserved == 2
    assert 1800 - 120 <= found.all.waiting["max"] <= 1801
    assert found.all.turns_per_hour == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_blocks": 3}, "num_blocks is 3"),
        ({"admission": "last"}, "admission is 'last'"),
        ({"admission": "room:0.5"}, "admission is 'room:0.5'"),
        ({"admission": "room:nan"}, "admission is 'room:nan'"),
        ({"admission": "arrival:2"}, "admission is 'arrival:2'"),
        ({"hours": 0.0}, r"hours is 0\.0"),
        ({"warm_up": -1.0}, r"warm_up is -1\.0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_invalid_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LoopOptions(**{"num_blocks": 60, **values})
