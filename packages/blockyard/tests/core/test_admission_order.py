"""The order of admission: who is next, what the lane guarantees, and how room is counted."""

from __future__ import annotations

import math
from typing import Any

import pytest

from blockyard import InvalidArgument, KVCacheManager, LayerGroup
from blockyard.admission import AdmissionRule, WaitingQueue
from blockyard.config import cache_config
from blockyard_testing import seeds
from blockyard_testing.seeds import draws, run_seed

from ..support.admission_loop import Loop

NUM_LOOPS = draws(24, 4)
#: Floats are added in another order than in the proof.
ROUNDING = 1e-6


def made(order: str = "fewest", **fields: Any) -> tuple[KVCacheManager, WaitingQueue, AdmissionRule]:
    given = {"num_blocks": 41, "block_size": 4, "max_num_seqs": 8, "max_model_len": 200, "watermark": 0.0}
    cache = KVCacheManager(cache_config(**given))
    queue = cache.waiting()
    return cache, queue, AdmissionRule(queue, order, **{"seconds": 0.1, **fields})


def turn(cache: KVCacheManager, queue: WaitingQueue, session: str, tokens: Any, now: float, ends: float) -> None:
    """A whole turn of a session."""
    ticket = queue.add(tokens, session=session, max_new_tokens=1, arrived=now)
    seq = cache.allocate(tokens)
    queue.admitted(ticket, now)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    queue.finished(ticket, ends, blocks=seq)
    cache.free(seq)


# ---------------------------------------------------------------- the orders


def test_arrival_is_the_order_of_arrival() -> None:
    _, queue, rule = made("arrival")
    late, early = queue.add(range(4), arrived=2.0), queue.add(range(40), arrived=1.0)
    assert rule.next(3.0) == early
    assert rule.order(3.0, 9) == [early, late]
    assert rule.wake_at(3.0) == math.inf
    assert rule.lane_bound(late, 3.0) == math.inf


def test_fewest_missing_is_the_shortest_wait() -> None:
    _, queue, rule = made("fewest")
    long, short = queue.add(range(40)), queue.add(range(100, 108))
    assert rule.next(0.0) == short
    assert rule.order(0.0, 1) == [short]
    queue.remove(short)
    assert rule.next(0.0) == long
    queue.remove(long)
    assert rule.next(0.0) is None


def test_a_context_in_use_a_moment_ago_comes_first() -> None:
    cache, queue, rule = made("room")
    turn(cache, queue, "a", range(60), 0.0, 1.0)
    assert rule.num_inside == 1
    outside = queue.add(range(100, 104), session="b", max_new_tokens=1, arrived=1.0)
    inside = queue.add(range(64), session="a", max_new_tokens=1, arrived=1.0)
    assert rule.next(1.0) == inside
    assert rule.order(1.0, 2) == [inside, outside]


def test_who_is_outside_comes_in_only_if_it_fits() -> None:
    cache, queue, rule = made("room")
    turn(cache, queue, "a", range(80), 0.0, 1.0)
    turn(cache, queue, "b", range(200, 240), 1.0, 2.0)
    assert rule.num_open_blocks == 38 - 30
    large = queue.add(range(300, 336), session="c", max_new_tokens=1, arrived=2.0)
    assert rule.next(2.0) is None
    small = queue.add(range(400, 420), session="d", max_new_tokens=1, arrived=2.0)
    assert rule.next(2.0) == small
    queue.remove(small)
    assert rule.wake_at(2.0) < math.inf
    assert rule.next(rule.wake_at(2.0)) == large


def test_shared_blocks_are_counted_once() -> None:
    cache, queue, rule = made("room")
    turn(cache, queue, "a", range(40), 0.0, 1.0)
    turn(cache, queue, "b", range(44), 1.0, 1.0)
    assert rule.num_open_blocks == 38 - 11
    ticket = queue.add([*range(40), *range(500, 600)], session="c", max_new_tokens=0, arrived=1.0)
    assert rule.next(1.0) == ticket


def test_the_first_is_admitted_although_it_fills_the_pool() -> None:
    _, queue, rule = made("room")
    ticket = queue.add(range(160), session="a", max_new_tokens=0)
    assert rule.next(0.0) == ticket


def test_a_session_that_is_over_leaves_its_room() -> None:
    cache, queue, rule = made("room")
    ticket = queue.add(range(60), session="a")
    seq = cache.allocate(range(60))
    queue.admitted(ticket, 0.0)
    assert rule.num_inside == 1
    queue.finished(ticket, 1.0, blocks=seq, is_over=True)
    cache.free(seq)
    assert (rule.num_inside, rule.num_open_blocks) == (0, 38)


def test_room_is_kept_for_a_time() -> None:
    """Half of the time in which the device computes 160 tokens, at most 4 times the context's own."""
    cache, queue, rule = made("room")
    turn(cache, queue, "a", range(19), 0.0, 1.0)
    waits = queue.add(range(700, 860), session="b", max_new_tokens=0, arrived=1.0)
    assert rule.next(1.0) is None
    assert rule.wake_at(1.0) == pytest.approx(1.0 + 4 * 20 * 0.1)
    assert rule.next(8.9) is None
    assert rule.next(9.1) == waits
    assert rule.num_inside == 0


def test_a_reset_empties_the_room() -> None:
    cache, queue, rule = made("room")
    turn(cache, queue, "a", range(60), 0.0, 1.0)
    cache.reset_prefix_cache()
    ticket = queue.add(range(700, 850), session="b", max_new_tokens=0, arrived=1.0)
    assert rule.next(1.0) == ticket
    assert rule.num_inside == 0


# ---------------------------------------------------------------- the lane


def test_the_oldest_is_admitted_when_its_credit_suffices() -> None:
    _, queue, rule = made("fewest", k=4.0)
    old = queue.add(range(40), arrived=0.0)
    for number in range(16):
        short = queue.add([number], arrived=float(number))
        assert rule.next(float(number)) == short
        queue.admitted(short, float(number))
        queue.finished(short, float(number))
    short = queue.add([99], arrived=15.9)
    assert rule.wake_at(15.9) == pytest.approx(16.0)
    assert rule.next(15.9) == short
    assert rule.next(16.0) == old
    assert rule.order(16.0, 2) == [old, short]
    queue.admitted(old, 16.0)
    assert (rule.credit, rule.num_lane) == (0.0, 1)


def test_credit_does_not_grow_while_nobody_waits() -> None:
    _, queue, rule = made("fewest", k=1.0)
    first = queue.add([1], arrived=0.0)
    rule.next(0.05)
    queue.admitted(first, 0.05)
    queue.finished(first, 0.05)
    queue.add(range(100), arrived=50.0)
    short = queue.add([1], arrived=50.0)
    assert rule.next(50.0) == short
    assert rule.credit == 0.0


def test_the_lane_sends_others_outside() -> None:
    """Not their blocks, which stay until they are evicted, but the room that is kept for them."""
    cache, queue, rule = made("room", k=1.0)
    turn(cache, queue, "a", range(60), 0.0, 1.0)
    turn(cache, queue, "b", range(200, 260), 1.0, 2.0)
    giant = queue.add(range(300, 440), session="c", max_new_tokens=0, arrived=2.0)
    inside = queue.add(range(64), session="a", max_new_tokens=1, arrived=2.0)
    assert rule.next(2.0) == inside
    assert rule.next(16.1) == giant
    assert rule.num_inside == 0
    assert queue.missing(inside) == 4
    assert rule.next(16.2) == giant


@pytest.mark.parametrize("order", ["fewest", "room"])
def test_nobody_waits_longer_than_the_lane_allows(order: str) -> None:
    num_waits = num_close = 0
    first = run_seed() % 10**6
    for seed in range(first, first + NUM_LOOPS):
        loop = Loop(seed, order, k=(1.0, 2.0, 4.0)[seed % 3])
        loop.run(150)
        late = [(wait, bound) for wait, bound in loop.waits if wait > bound + ROUNDING]
        assert late == [], seed
        num_waits += len(loop.waits)
        num_close += sum(wait > bound / 4 for wait, bound in loop.waits)
    seeds.lines.append(f"lane of {order}: {num_waits} admissions within the bound, {num_close} above a quarter of it")
    assert num_waits > 20 * NUM_LOOPS


def test_without_a_lane_somebody_starves() -> None:
    _, queue, rule = made("fewest", k=None)
    old = queue.add(range(100), arrived=0.0)
    for number in range(100):
        short = queue.add([number], arrived=float(number))
        assert rule.next(float(number)) == short
        queue.remove(short)
    assert rule.lane_bound(old, 99.0) == math.inf


# ---------------------------------------------------------------- room is exact


@pytest.mark.parametrize(
    "more",
    [{}, {"groups": (LayerGroup(4), LayerGroup(4, 8))}, {"eviction_policy": "lfu"}, {"max_steps_in_flight": 1}],
)
def test_idle_blocks_of_kept_contexts_are_counted_once(more: dict[str, Any]) -> None:
    first = run_seed() % 10**6
    for seed in range(first, first + NUM_LOOPS // 2):
        loop = Loop(seed, "room", more=more, num_blocks=90)
        for _ in range(12):
            loop.run(10)
            assert loop.rule._order.contexts.kept.num_idle == loop.kept_idle()


def test_room_computes_less_than_arrival() -> None:
    """Of sessions that overflow the pool, and go on after pauses."""
    computed = {}
    for order in ("arrival", "room"):
        loops = [Loop(seed, order, num_sessions=14, num_blocks=80) for seed in range(4)]
        for loop in loops:
            loop.run(400)
        computed[order] = sum(loop.num_computed for loop in loops) / sum(loop.num_turns for loop in loops)
    assert computed["room"] < computed["arrival"]


# ---------------------------------------------------------------- arguments


def test_seconds_may_be_a_function() -> None:
    asked = []

    def seconds(missing: int, num_tokens: int) -> float:
        asked.append((missing, num_tokens))
        return missing * 0.1

    _, queue, rule = made("fewest", seconds=seconds)
    queue.add(range(10))
    rule.next(0.0)
    assert set(asked) == {(10, 10)}


@pytest.mark.parametrize("answer", [-1.0, math.nan, "soon", None])
def test_a_bad_answer_of_the_function_is_refused(answer: Any) -> None:
    _, queue, _ = made("fewest", seconds=lambda missing, num_tokens: answer)
    with pytest.raises(InvalidArgument, match=r"seconds\("):
        queue.add([1, 2])
    assert len(queue) == 0


def test_an_error_of_the_function_reaches_the_caller() -> None:
    def fails(missing: int, num_tokens: int) -> float:
        raise OSError("no clock")

    _, queue, _ = made("fewest", seconds=fails)
    with pytest.raises(OSError, match="no clock"):
        queue.add([1, 2])
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"order": "best"}, "order is 'best'; it must be one of arrival, fewest, room"),
        ({"seconds": 0.0}, "seconds is 0.0; it must be above 0, or a function"),
        ({"seconds": None}, "seconds is None; it must be a number"),
        ({"k": 0.5}, "k is 0.5; it must be 1 or more, or None for no lane"),
        ({"k": "4"}, "k is '4'; it must be a number"),
        ({"queue": None}, "queue is None; it must be a WaitingQueue"),
    ],
)
def test_a_bad_rule_is_refused(given: dict[str, Any], message: str) -> None:
    cache = KVCacheManager(cache_config(num_blocks=10, max_num_seqs=2, max_model_len=64))
    queue = cache.waiting()
    with pytest.raises(InvalidArgument, match=message):
        AdmissionRule(**{"queue": queue, "seconds": 0.1, **given})
    AdmissionRule(queue, seconds=0.1)
    with pytest.raises(InvalidArgument, match="queue has a rule"):
        AdmissionRule(queue, seconds=0.1)


def test_time_does_not_go_back() -> None:
    _, queue, rule = made("fewest")
    queue.add([1, 2], arrived=5.0)
    with pytest.raises(InvalidArgument, match=r"now is 4.0; it must be at least 5.0"):
        rule.next(4.0)
    rule.next(6.0)
    with pytest.raises(InvalidArgument, match=r"now is 5.0; it must be at least 6.0"):
        rule.wake_at(5.0)


def test_only_admitted_requests_finish() -> None:
    cache, queue, _ = made("room")
    ticket = queue.add([1, 2])
    with pytest.raises(InvalidArgument, match="no request was admitted with it"):
        queue.finished(ticket, 0.0)
    queue.admitted(ticket, 0.0)
    with pytest.raises(InvalidArgument, match="no request waits with it"):
        queue.admitted(ticket, 0.0)
    queue.finished(ticket, 0.0)
    with pytest.raises(InvalidArgument, match="no request was admitted with it"):
        queue.finished(ticket, 0.0)
    cache.check()


def test_a_function_that_fails_when_a_turn_ends_changes_nothing() -> None:
    fails = [False]

    def seconds(missing: int, num_tokens: int) -> float:
        if fails[0]:
            raise OSError("no clock")
        return missing * 0.1

    cache, queue, rule = made("room", seconds=seconds)
    ticket = queue.add(range(60), session="a")
    seq = cache.allocate(range(60))
    queue.admitted(ticket, 0.0)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    before = rule.num_open_blocks
    fails[0] = True
    with pytest.raises(OSError, match="no clock"):
        queue.finished(ticket, 1.0, blocks=seq)
    fails[0] = False
    assert (rule.num_inside, rule.num_open_blocks) == (1, before)
    queue.finished(ticket, 1.0, blocks=seq)
    cache.free(seq)
    assert rule.num_open_blocks == 38 - 15


def test_no_room_is_kept_for_contexts_of_a_reset_cache() -> None:
    cache, queue, rule = made("room", k=None)
    turn(cache, queue, "idle", range(40), 0.0, 0.5)
    turn(cache, queue, "waits", range(100, 140), 0.0, 0.5)
    queue.add(range(100, 141), session="waits", max_new_tokens=0, arrived=1.0)
    running = queue.add(range(200, 220), session="runs", max_new_tokens=0, arrived=1.0)
    seq = cache.allocate(range(200, 220))
    queue.admitted(running, 1.0)
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    cache.reset_prefix_cache()
    queue.finished(running, 1.5, blocks=seq)
    cache.free(seq)
    assert rule.next(2.0) is not None
    assert (rule.num_inside, rule.num_open_blocks) == (0, 38)
    other = cache.allocate(range(300, 420))
    cache.commit([other], cache.reserve([other]).num_scheduled)
    cache.free(other)
    assert rule.num_open_blocks == 38
    cache.check()
