"""What happened and who holds what, as text: the lines agree with the cache, and are cut where they were told to."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest

from blockyard import BlockPool, CacheConfig, InvalidArgument, KVCacheManager, LayerGroup, ObserveConfig
from blockyard.observe import describe_blocks, describe_history, describe_leaks, report

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot


def story() -> Checked:
    """Three requests in three blocks: the third evicts the first."""
    cache = Checked(num_blocks=4, history_size=100)
    cache.free(cache.prefilled(prompt(1, 8)))
    cache.advance_time(2.5)
    seq = cache.allocate(prompt(1, 6), holder="again")
    cache.compute(seq)
    cache.free(seq)
    cache.allocate(prompt(2, 12), holder="large")
    return cache


def test_the_history_in_a_summary_and_lines() -> None:
    assert describe_history(story().cache).splitlines() == [
        "8 events, of which the latest 8 are remembered: take 6 blocks in 3, share 1 blocks in 1, "
        "release 4 blocks in 2, evict 2 blocks in 2; in all 7 blocks allocated, 4 freed",
        "event 0 at 0: allocate: take 1, 2; 1 free",
        "event 1 at 0: free: release 1, 2; 3 free",
        "event 2 at 2.5: allocate 'again': share 1; 2 free",
        "event 3 at 2.5: allocate 'again': take 3; 1 free",
        "event 4 at 2.5: free 'again': release 1, 3; 3 free",
        "event 5 at 2.5: allocate 'large': evict 2; 0 free",
        "event 6 at 2.5: allocate 'large': evict 1; 0 free",
        "event 7 at 2.5: allocate 'large': take 3, 2, 1; 0 free",
    ]


def test_the_limit_keeps_the_latest_events() -> None:
    cache = story().cache
    lines = describe_history(cache).splitlines()
    for limit in (0, 1, 3, 8, 100):
        assert describe_history(cache, limit).splitlines() == [lines[0], *lines[1:][8 - min(limit, 8) :]]


def test_forgotten_events_are_counted_but_not_listed() -> None:
    cache = Checked(history_size=2)
    for number in range(5):
        cache.free(cache.prefilled(prompt(number, 2)))
    first = "10 events, of which the latest 2 are remembered: take 1 blocks in 1, release 1 blocks in 1; "
    first += "in all 5 blocks allocated, 5 freed"
    assert describe_history(cache.cache).splitlines()[0] == first
    assert len(describe_history(cache.cache).splitlines()) == 3


def test_missing_history_is_reported() -> None:
    assert describe_history(Checked().cache) == "nothing is remembered: history_size is 0"
    assert describe_history(Checked(history_size=5).cache) == "nothing has happened yet"


def test_leaks_by_holder() -> None:
    cache = Checked(num_blocks=12, num_cpu_blocks=8)
    cache.free(cache.prefilled(prompt(3, 8)))
    cache.cache.pool.get_new_blocks(2, holder="warm-up")
    first = cache.allocate(prompt(1, 6), holder="chat")
    cache.compute(first)
    parked = cache.allocate(prompt(2, 3), holder="parked")
    cache.compute(parked)
    cache.swap_out([parked])
    assert describe_leaks(cache.cache).splitlines() == [
        "4 of 11 blocks are used, 2 idle and cached, 5 free; holders: 3",
        f"sequence {first} 'chat': 6 tokens, 2 blocks: 5, 6",
        f"swapped sequence {parked} 'parked': 3 tokens, 1 CPU blocks: 1",
        "lease 1 'warm-up': 2 blocks: 3, 4",
    ]


def test_nothing_held_is_one_line() -> None:
    cache = Checked(num_blocks=5)
    cache.free(cache.prefilled(prompt(1, 8)))
    assert describe_leaks(cache.cache) == "0 of 4 blocks are used, 2 idle and cached, 2 free; holders: 0"


def test_holders_and_ids_are_cut() -> None:
    cache = Checked(num_blocks=60)
    cache.allocate(prompt(1, 48), holder="fits")
    cache.allocate(prompt(2, 52), holder="cut")
    cache.allocate(prompt(3, 1), holder="third")
    lines = describe_leaks(cache.cache).splitlines()
    assert lines[1].endswith("12 blocks: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")
    assert lines[2].endswith("13 blocks: 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, ... (13 in all)")
    assert describe_leaks(cache.cache, 2).splitlines() == [*lines[:3], "and 1 more"]
    assert describe_leaks(cache.cache, 0).splitlines() == [lines[0], "and 3 more"]
    assert describe_leaks(cache.cache, 3).splitlines() == lines


def test_retiring_blocks_count_until_they_are_freed() -> None:
    cache = Checked(num_blocks=8)
    cache.prefilled(prompt(1, 20))
    cache.resize(3)
    assert (
        describe_leaks(cache.cache).splitlines()[0] == "5 of 5 blocks are used, 0 idle and cached, 0 free; holders: 1"
    )


def test_a_holder_of_nothing_is_named_too() -> None:
    """With windows alone, blocks are taken as tokens come."""
    cache = Checked(groups=(LayerGroup(4, 4),))
    seq = cache.allocate(prompt(1, 6), holder="waiting")
    assert describe_leaks(cache.cache).splitlines()[1] == f"sequence {seq} 'waiting': 6 tokens"


def test_blocks_that_nobody_holds_and_nobody_can_take_are_missing() -> None:
    """A broken count, made by hand: what `check` would say, the report says too."""
    cache = Checked(num_blocks=6).cache
    cache._parts.kv_pool.queue.remove(3)
    lines = describe_leaks(cache).splitlines()
    assert lines[0] == "1 of 5 blocks are used, 0 idle and cached, 4 free; holders: 0"
    assert lines[1:] == ["1 blocks are counted as used, but have no holder"]


def test_reports_change_nothing() -> None:
    cache = story().cache
    before = snapshot(cache)
    describe_history(cache)
    describe_leaks(cache)
    assert snapshot(cache) == before


@pytest.mark.parametrize("limit", [-1, 2**20 + 1, 1.5, True, None])
def test_a_limit_outside_its_range_is_refused(limit: object) -> None:
    for describe in (describe_history, describe_leaks):
        with pytest.raises(InvalidArgument, match="limit is"):
            describe(Checked().cache, limit)  # type: ignore[arg-type]


def test_the_examples_in_its_docstrings_hold() -> None:
    assert doctest.testmod(report).failed == 0


def test_blocks_line_by_line_with_groups_and_a_cpu_pool() -> None:
    """Tokens are known while a sequence holds them, while they are cached, and of a partly filled block."""
    groups = (LayerGroup(4), LayerGroup(8, sliding_window=9))
    cache = Checked(num_blocks=20, groups=groups, num_cpu_blocks=4)
    seq = cache.prefilled(list(range(18)))
    blocks = {block.block_id: block for block in (cache.block(number) for number in range(20))}
    held = [cache.block_ids(seq, group).tolist() for group in (0, 1)]
    assert [(blocks[b].num_tokens, blocks[b].group) for b in held[0]] == [(4, 0)] * 4 + [(2, 0)]
    assert [(blocks[b].num_tokens, blocks[b].group) for b in held[1] if b] == [(8, 1), (2, 1)]
    assert [blocks[b].token_ids for b in held[0]] == [list(range(start, start + 4)) for start in (0, 4, 8, 12)] + [[]]
    assert blocks[held[1][1]].token_ids == list(range(8, 16))
    cache.free(seq)
    assert cache.block(held[1][1]).token_ids == list(range(8, 16))
    assert cache.block(held[0][0]).num_tokens == 4
    assert cache.block(held[0][4]).num_tokens == 0
    assert cache.block(held[0][4]).group is None
    lines = describe_blocks(cache.cache, [held[0][0], held[1][1], held[0][4], 0]).splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "idle, 4 tokens",
        "idle, 8 tokens, group 1",
        "free",
        "null",
    ]


FORGED = "a; 8 free\nevent 9 at 0: free boss: release 1\x1b[2J\u202e"


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVCacheManager(CacheConfig(9, 4, observe=ObserveConfig(history_size=9))),
        lambda: BlockPool(9, 4, history_size=9),
    ],
)
def test_a_holders_name_forges_no_line_and_moves_no_cursor(make: Callable[[], KVCacheManager | BlockPool]) -> None:
    cache = make()
    if isinstance(cache, KVCacheManager):
        cache.allocate([1, 2, 3], holder=FORGED)
        cache.pool.get_new_blocks(1, holder=FORGED)
    else:
        cache.touch(cache.get_new_blocks(2, holder=FORGED), holder=FORGED)
    for text in (describe_history(cache), describe_blocks(cache), describe_leaks(cache)):
        assert repr(FORGED) in text
        assert all(line.isprintable() for line in text.split("\n"))
        assert not any(line.startswith("event 9") for line in text.split("\n"))
    lease = cache.pool.get_new_blocks(1, holder="sequence 7 'boss'") if isinstance(cache, KVCacheManager) else None
    if lease is not None:
        assert describe_blocks(cache, list(lease)).endswith("lease \"sequence 7 'boss'\"")
