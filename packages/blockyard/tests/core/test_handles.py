"""Handles and holders: a stale handle is known, rows are reused in order, and reports name who holds what."""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, KVCacheManager, UnknownSequence
from blockyard.core.sequences.table import ROW_MASK

from ..support.checked import Checked, prompt


def test_stale_handle_is_detected_after_its_row_is_reused() -> None:
    cache = Checked()
    old = cache.allocate([1], holder="old")
    cache.free(old)
    message = rf"^sequence {old} \(row 0\) has finished: it was freed already; row 0 is now empty$"
    with pytest.raises(UnknownSequence, match=message):
        cache.free(old)
    new = cache.allocate([2], holder="new")
    assert old & ROW_MASK == new & ROW_MASK == 0
    assert old != new
    message = rf"^sequence {old} \(row 0\) .*; row 0 is now held by sequence {new} 'new'$"
    for call in (cache.free, cache.num_tokens, cache.token_ids, cache.block_ids, cache.fork):
        with pytest.raises(UnknownSequence, match=message):
            call(old)
    assert cache.tokens(new) == [2]


@pytest.mark.parametrize("handle", [0, 1, 7, 8, 9, 2**20 - 1, 2**20, 2**20 + 8, 2**21])
def test_invented_handle_is_unknown_even_for_an_empty_row(handle: int) -> None:
    """An empty row is marked 0, which must not make 0 a handle; and row 8 is one beyond the table."""
    cache = Checked()
    for call in (cache.num_tokens, cache.free, lambda seq: cache.free([seq]), lambda seq: cache.reserve([seq], 1)):
        with pytest.raises(UnknownSequence, match=rf"^sequence {handle} was never allocated here$"):
            call(handle)


def test_rows_are_allocated_in_order_and_the_last_freed_first() -> None:
    """So a batch that comes and goes keeps to few adjacent rows, and its block table is a view."""
    cache = Checked()
    seqs = [cache.allocate([number]) for number in range(4)]
    assert [seq & ROW_MASK for seq in seqs] == [0, 1, 2, 3]
    cache.free([seqs[1], seqs[3]])
    assert [cache.allocate([9]) & ROW_MASK for _ in range(3)] == [3, 1, 4]


def test_the_leak_report_names_who_still_runs() -> None:
    cache = Checked()
    first, second = cache.allocate([1], holder="first"), cache.allocate([2])
    assert cache.running() == {first: "first", second: ""}
    assert cache.block(1).holders == [f"sequence {first} 'first'"]
    assert cache.block(2).holders == [f"sequence {second}"]
    cache.free(first)
    assert cache.running() == {second: ""}
    assert cache.block(1).holders == []


def test_a_block_shows_what_it_holds_and_whether_it_is_computed() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 5), holder="me")
    block = cache.block(1)
    assert (block.token_ids, block.is_cached, block.is_computed) == (prompt(1, 4), True, False)
    cache.compute(seq)
    assert cache.block(1).is_computed
    assert cache.block(2).is_cached is False
    assert cache.block(0).holders == []


# ---------------------------------------------------------------- handles of other managers


def refuses(cache: KVCacheManager, handle: int, message: str) -> None:
    """Every call that takes handles says so, and nothing is freed."""
    running = cache.running()
    calls = (
        cache.free,
        cache.num_tokens,
        cache.num_computed_tokens,
        cache.token_ids,
        cache.block_ids,
        cache.is_swapped_out,
        cache.fork,
        lambda seq: cache.free([*running, seq]),
        lambda seq: cache.reserve([seq], 1),
        lambda seq: cache.commit([seq], 0),
        lambda seq: cache.can_append([seq]),
        lambda seq: cache.append([seq], [1]),
        lambda seq: cache.regroup([seq], [0]),
        lambda seq: cache.truncate(seq, 1),
        lambda seq: cache.num_owned_blocks([seq]),
    )
    for call in calls:
        with pytest.raises(UnknownSequence, match=message):
            call(handle)
    assert cache.running() == running
    cache.check()


def make_manager(max_num_seqs: int = 4) -> KVCacheManager:
    return KVCacheManager(CacheConfig(20, 4, max_num_seqs=max_num_seqs, max_model_len=16, watermark=0.0))


def test_a_handle_of_another_manager_is_named_as_such() -> None:
    """They used to be equal: freeing one's sequence at the other ended another sequence without a word."""
    ours, theirs = make_manager(), make_manager()
    our, their = ours.allocate([1, 2]), theirs.allocate([1, 2])
    assert our != their
    refuses(ours, their, rf"^sequence {their} is a handle of another manager$")
    refuses(theirs, our, rf"^sequence {our} is a handle of another manager$")
    theirs.free(their)
    refuses(ours, their, "is a handle of another manager")
    refuses(theirs, their, "has finished")


def test_many_managers_share_no_handle() -> None:
    managers = [make_manager(1 + number % 5) for number in range(40)]
    handles: dict[int, KVCacheManager] = {}
    for turn in range(60):
        for cache in managers[turn % 3 :: 3]:
            cache.free(list(cache.running()))
            handle = cache.allocate([turn + 1])
            assert handle not in handles
            handles[handle] = cache
    for cache in managers:
        live = set(cache.running())
        for handle, owner in list(handles.items())[::17]:
            if owner is not cache:
                with pytest.raises(UnknownSequence, match="is a handle of another manager"):
                    cache.free(handle)
            elif handle not in live:
                with pytest.raises(UnknownSequence, match="has finished"):
                    cache.free(handle)
        assert set(cache.running()) == live


def test_handles_stay_apart_when_a_manager_needs_more_serials_than_one_share() -> None:
    """After 65,536 sequences it draws another share; another manager has the one between."""
    ours = make_manager()
    first = ours.allocate([1])
    theirs = make_manager()
    before = theirs.allocate([2])
    ours.free(first)
    last = first
    for _ in range(70_000):
        last = ours.allocate([1])
        ours.free(last)
    after = theirs.allocate([2])
    for handle in (before, after):
        refuses(ours, handle, "is a handle of another manager")
    for handle in (first, last):
        refuses(ours, handle, "has finished")
        refuses(theirs, handle, "is a handle of another manager")
    assert last - first > 65_536 << 20
    assert ours.allocate([1]) > last
    beyond = last + (2**20 << 16 << 8)
    refuses(ours, beyond, "was never allocated here")


def test_a_handle_outlives_its_manager_and_names_nobody() -> None:
    gone = make_manager()
    handle = gone.allocate([1])
    del gone
    refuses(make_manager(), handle, "is a handle of another manager")
