"""The allocation history: what happened to which blocks, in which call and for whom."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard import Admission, CacheConfig, InvalidArgument, KVCacheManager, LayerGroup, ObserveConfig, OutOfBlocks
from blockyard.answers import AllocationEvent
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt


def remembering(num_blocks: int = 20, block_size: int = 4, **settings: Any) -> Checked:
    return Checked(num_blocks, block_size, **{"history_size": 1000, **settings})


def told(cache: Checked) -> list[tuple[str, str, list[int], int]]:
    """Action, actor, blocks and free blocks of each event."""
    return [(event.action, event.actor, event.block_ids, event.num_free) for event in cache.history()]


def test_history_lists_a_requests_events_in_order() -> None:
    cache = remembering(num_blocks=8)
    seq = cache.allocate(prompt(1, 6), holder="first")
    cache.compute(seq, [7])
    second = cache.allocate(prompt(1, 6), holder="second")
    cache.free(seq)
    cache.free(second)
    assert told(cache) == [
        ("take", "allocate first", [1, 2], 5),
        ("share", "allocate second", [1], 5),
        ("take", "allocate second", [3], 4),
        # Blocks are named in the order of the sequence; they are freed last first.
        ("release", "free first", [1, 2], 5),
        ("release", "free second", [1, 3], 7),
    ]
    assert [event.number for event in cache.history()] == [0, 1, 2, 3, 4]


def test_events_name_the_call_that_caused_them() -> None:
    cache = remembering(num_blocks=8)
    seq = cache.prefilled(prompt(1, 6), [7])
    child = cache.fork(seq)[0]
    cache.reserve([seq], 3)
    cache.commit([seq], 1)
    cache.truncate(child, 3)
    assert told(cache)[1:] == [
        ("share", "fork", [1, 2], 5),
        ("take", "reserve", [3], 4),
        ("release", "reserve", [2], 4),
        ("take", "reserve", [4], 3),
        ("release", "truncate", [2], 4),
    ]


def test_an_eviction_comes_before_the_taking_that_needs_it() -> None:
    cache = remembering(num_blocks=4)
    cache.free(cache.prefilled(prompt(1, 12)))
    cache.allocate(prompt(2, 8), holder="second")
    assert told(cache)[2:] == [
        ("evict", "allocate second", [3], 1),
        ("evict", "allocate second", [2], 1),
        ("take", "allocate second", [3, 2], 1),
    ]


def test_blocks_before_a_window_are_released_in_commit() -> None:
    cache = remembering(groups=(LayerGroup(4, 4),))
    seq = cache.allocate(prompt(1, 12), holder="sliding")
    cache.reserve([seq], 8)
    cache.commit([seq], 8)
    # Token 8 attends to 5 and later: block 0 is behind the window.
    assert told(cache)[-1] == ("release", "commit", [1], 18)


def test_lease_events_have_their_holders() -> None:
    """Whoever takes blocks past the manager is not mistaken for its last call."""
    cache = remembering(num_blocks=8)
    cache.free(cache.prefilled(prompt(1, 8)))
    pool = cache.cache.pool
    lease = pool.get_new_blocks(1, holder="mine")
    other = pool.touch(lease, holder="yours")
    hit = cache.hold_cached(prompt(1, 8))
    one = cache.hold_cached(prompt(1, 4), extra_keys=(), holder="one")
    pool.extend(lease, 1)
    for held in (lease, other, hit, one):
        pool.free_blocks(held)
    assert told(cache)[2:] == [
        ("take", "get_new_blocks mine", [3], 6),
        ("share", "touch yours", [3], 6),
        ("share", "hold_cached", [1, 2], 4),
        ("share", "hold_cached one", [1], 4),
        ("take", "extend mine", [4], 3),
        ("release", "free_blocks mine", [3, 4], 4),
        ("release", "free_blocks yours", [3], 5),
        ("release", "free_blocks", [1, 2], 6),
        ("release", "free_blocks one", [1], 7),
    ]


def test_resizing_and_swapping_are_recorded() -> None:
    cache = remembering(num_blocks=8, num_cpu_blocks=8)
    cache.free(cache.prefilled(prompt(1, 12)))
    cache.resize(3)
    assert [(action, actor) for action, actor, _, _ in told(cache)][-1] == ("evict", "resize")
    cache.resize(8)
    seq = cache.prefilled(prompt(2, 8))
    cache.swap_out([seq])
    cache.swap_in([seq])
    actors = [actor for _, actor, _, _ in told(cache)]
    assert {"swap_out", "swap_in"} <= set(actors)


def test_retiring_block_is_evicted_when_released() -> None:
    cache = remembering(num_blocks=6)
    seq = cache.allocate(prompt(1, 16), holder="last")
    cache.compute(seq)
    cache.resize(4)
    cache.free(seq)
    assert told(cache)[1:] == [
        ("evict", "free last", [4], 0),
        ("release", "free last", [1, 2, 3, 4], 3),
    ]


def test_event_times_are_those_of_advance_time() -> None:
    cache = remembering()
    seq = cache.allocate(prompt(1, 3))
    cache.advance_time(2.5)
    cache.advance_time(2.5)
    cache.free(seq)
    assert [event.time for event in cache.history()] == [0.0, 2.5]
    with pytest.raises(InvalidArgument, match=r"now is 2.0; it must be at least 2.5, the time of the last call"):
        cache.advance_time(2)
    for bad in (float("nan"), "3", None, True):
        with pytest.raises(InvalidArgument, match="now is"):
            cache.advance_time(bad)


def test_the_ring_keeps_the_latest_events_in_order() -> None:
    for size in (1, 2, 3, 7):
        cache = remembering(history_size=size)
        everything = remembering()
        for number in range(10):
            for each in (cache, everything):
                each.free(each.prefilled(prompt(number, number + 1)))
            assert cache.history() == everything.history()[-size:]


def test_history_is_returned_as_a_copy() -> None:
    cache = remembering()
    cache.allocate(prompt(1, 8))
    event = cache.history()[0]
    event.block_ids.clear()
    assert cache.history() == [AllocationEvent(0, 0.0, "take", "allocate", [1, 2], 17)]


def test_disabled_history_is_empty_and_rejected_calls_are_not_recorded() -> None:
    cache = Checked()
    cache.allocate(prompt(1, 8))
    assert cache.history() == []
    cache = remembering(num_blocks=4)
    cache.prefilled(prompt(1, 8))
    before = cache.history()
    with pytest.raises(OutOfBlocks):
        cache.allocate(prompt(2, 8))
    with pytest.raises(InvalidArgument):
        cache.resize(0)
    cache.reserve([], 0)
    assert cache.history() == before


@pytest.mark.parametrize("size", [-1, 2**24 + 1, 1.5, True, "1"])
def test_a_size_outside_its_limits_is_refused(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="history_size"):
        KVCacheManager(CacheConfig(4, observe=ObserveConfig(history_size=size)))


@pytest.mark.parametrize("settings", [{}, {"groups": (LayerGroup(4), LayerGroup(4, 6)), "num_cpu_blocks": 12}])
def test_replaying_the_history_gives_the_reference_counts(settings: dict[str, Any]) -> None:
    """At random: what the events say was taken, shared and released is what the pool counts, after every call."""
    generator = random.Random(run_seed())
    cache = remembering(30, history_size=100_000, partial_hits=True, **settings)
    seqs: list[int] = []
    for _ in range(120):
        tokens = [generator.choice((1, 1, 2)) for _ in range(generator.randint(1, 20))]
        if cache.can_allocate(tokens) is Admission.OK and len(seqs) < 6:
            seqs.append(cache.allocate(tokens))
            cache.try_compute(seqs[-1])
        if seqs and generator.random() < 0.7:
            cache.free(seqs.pop(generator.randrange(len(seqs))))
        if generator.random() < 0.1:
            cache.resize(generator.randint(28, 40))
        counts, cached_now = replay(cache.history())
        live = cache.pool.ref_counts().tolist()
        assert counts == {block: count for block, count in enumerate(live) if count}
        assert not cached_now & set(counts), "a block was evicted while somebody held it"


def replay(events: list[AllocationEvent]) -> tuple[dict[int, int], set[int]]:
    """Reference counts after these events, and what was evicted last by the latest event."""
    counts: dict[int, int] = {}
    evicted: set[int] = set()
    for event in events:
        for block in event.block_ids:
            if event.action == "take":
                assert block not in counts, f"event {event.number} takes block {block}, which is held"
                counts[block] = 1
            elif event.action == "share":
                counts[block] = counts.get(block, 0) + 1
            elif event.action == "release":
                counts[block] -= 1
                if counts[block] == 0:
                    del counts[block]
            else:
                assert event.action == "evict"
        evicted = {block for block in event.block_ids if event.action == "evict"}
    return counts, evicted
