"""Handles and holders: a stale handle is known, rows are reused in order, and reports name who holds what."""

from __future__ import annotations

import pytest

from blockyard import UnknownSequence
from blockyard.core.sequences import ROW_MASK

from ..support.checked import Checked, prompt


def test_a_stale_handle_is_known_though_its_row_has_a_new_tenant() -> None:
    cache = Checked()
    old = cache.allocate([1], "old")
    cache.free(old)
    message = rf"^sequence {old} \(row 0\) has finished: it was freed already; row 0 is now empty$"
    with pytest.raises(UnknownSequence, match=message):
        cache.free(old)
    new = cache.allocate([2], "new")
    assert old & ROW_MASK == new & ROW_MASK == 0
    assert old != new
    message = rf"^sequence {old} \(row 0\) .*; row 0 is now held by sequence {new} 'new'$"
    for call in (cache.free, cache.num_tokens, cache.token_ids, cache.block_ids, cache.fork):
        with pytest.raises(UnknownSequence, match=message):
            call(old)
    assert cache.tokens(new) == [2]


@pytest.mark.parametrize("handle", [0, 1, 7, 8, 9, 2**20 - 1, 2**20, 2**20 + 8, 2**21])
def test_an_invented_handle_names_nobody_even_where_a_row_is_empty(handle: int) -> None:
    """An empty row is marked 0, which must not make 0 a handle; and row 8 is one beyond the table."""
    cache = Checked()
    for call in (cache.num_tokens, cache.free, lambda seq: cache.free([seq]), lambda seq: cache.reserve([seq], 1)):
        with pytest.raises(UnknownSequence, match=rf"^sequence {handle} was never allocated here$"):
            call(handle)


def test_rows_are_given_out_in_order_and_the_last_freed_first() -> None:
    """So a batch that comes and goes keeps to few adjacent rows, and its block table is a view."""
    cache = Checked()
    seqs = [cache.allocate([number]) for number in range(4)]
    assert [seq & ROW_MASK for seq in seqs] == [0, 1, 2, 3]
    cache.free([seqs[1], seqs[3]])
    assert [cache.allocate([9]) & ROW_MASK for _ in range(3)] == [3, 1, 4]


def test_the_leak_report_names_who_still_runs() -> None:
    cache = Checked()
    first, second = cache.allocate([1], "first"), cache.allocate([2])
    assert cache.running() == {first: "first", second: ""}
    assert cache.block(1).holders == [f"sequence {first} 'first'"]
    assert cache.block(2).holders == [f"sequence {second}"]
    cache.free(first)
    assert cache.running() == {second: ""}
    assert cache.block(1).holders == []


def test_a_block_shows_what_it_holds_and_whether_it_is_computed() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 5), "me")
    block = cache.block(1)
    assert (block.token_ids, block.is_cached, block.is_computed) == (prompt(1, 4), True, False)
    cache.compute(seq)
    assert cache.block(1).is_computed
    assert cache.block(2).is_cached is False
    assert cache.block(0).holders == []
