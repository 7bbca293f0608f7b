"""Every token of every head goes to its destination, whatever the block sizes and ranks of the two sides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import InvalidArgument
from blockyard_engine.parallel import HandoffError, HeadShards, PeerMismatch, head_runs, token_runs

sizes = st.integers(1, 9)


def table(data: st.DataObject, num_tokens: int, size: int) -> list[int]:
    count = -(-num_tokens // size)
    ids = data.draw(st.permutations(range(1, 2 * count + 2)))
    return sorted(ids[:count]) if data.draw(st.booleans()) else list(ids[:count])


@settings(max_examples=300, deadline=None)
@given(st.data(), sizes, sizes, st.integers(0, 70))
def test_runs_are_a_bijection_and_as_long_as_they_can_be(
    data: st.DataObject, from_size: int, to_size: int, stop: int
) -> None:
    start = data.draw(st.integers(0, stop))
    from_table, to_table = table(data, stop, from_size), table(data, stop, to_size)
    runs = token_runs(from_table, from_size, to_table, to_size, start, stop)
    tokens = range(start, stop)
    assert runs.from_tokens().tolist() == [from_table[t // from_size] * from_size + t % from_size for t in tokens]
    assert runs.to_tokens().tolist() == [to_table[t // to_size] * to_size + t % to_size for t in tokens]
    assert len(set(runs.to_tokens().tolist())) == runs.num_tokens == stop - start
    assert (runs.lengths > 0).all()
    ends = np.stack([runs.from_slots + runs.lengths, runs.to_slots + runs.lengths])[:, :-1]
    follows = (ends == np.stack([runs.from_slots, runs.to_slots])[:, 1:]).all(axis=0)
    assert not follows.any(), "two runs that follow one another on both sides are one"


def test_neighbouring_blocks_are_one_run() -> None:
    runs = token_runs([5, 6, 7, 8], 16, [3, 4, 5, 6], 16, 0, 64)
    assert (runs.from_slots.tolist(), runs.to_slots.tolist(), runs.lengths.tolist()) == ([80], [48], [64])


@pytest.mark.parametrize(
    ("from_table", "to_table", "error", "text"),
    [
        ([1], [1, 2], HandoffError, "the sender has 1 blocks of 4 tokens; token 7 is not in one of them"),
        ([1, 2], [1], HandoffError, "the receiver has 1 blocks of 4 tokens"),
        ([0, 2], [1, 2], HandoffError, "has freed the block of token 0"),
        ([1, 2], [1, -3], HandoffError, "has freed the block of token 4"),
        ([1.5, 2], [1, 2], InvalidArgument, "dtype float64"),
        ([[1, 2]], [1, 2], InvalidArgument, r"shape \(1, 2\)"),
    ],
)
def test_invalid_block_tables_are_refused(
    from_table: object, to_table: object, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        token_runs(from_table, 4, to_table, 4, 0, 8)


def test_a_block_that_is_not_needed_may_be_freed() -> None:
    assert token_runs([0, 2], 4, [0, 7], 4, 4, 8).to_slots.tolist() == [28]


@st.composite
def shards(draw: st.DrawFn, num_heads: int) -> HeadShards:
    if draw(st.booleans()):
        return HeadShards.even(num_heads, draw(st.integers(1, 9)))
    starts = draw(st.lists(st.integers(0, num_heads - 1), min_size=1, max_size=4))
    ranges = [(first, draw(st.integers(1, num_heads - first))) for first in starts]
    return HeadShards(num_heads, ((0, num_heads), *ranges))


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 8))
def test_every_rank_gets_each_of_its_heads_once_from_a_rank_that_has_it(data: st.DataObject, num_heads: int) -> None:
    sender, receiver = data.draw(shards(num_heads)), data.draw(shards(num_heads))
    got: dict[tuple[int, int], int] = {}
    for run in head_runs(sender, receiver):
        for number in range(run.num_heads):
            place = (run.to_rank, run.to_head + number)
            assert place not in got
            assert run.from_head + number < sender.ranges[run.from_rank][1]
            got[place] = sender.ranges[run.from_rank][0] + run.from_head + number
    assert got == {
        (rank, number): first + number for rank, (first, count) in enumerate(receiver.ranges) for number in range(count)
    }


def test_replicas_share_the_sending() -> None:
    runs = head_runs(HeadShards.even(1, 4), HeadShards.even(1, 4))
    assert [(run.from_rank, run.to_rank) for run in runs] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_heads_are_divided_evenly() -> None:
    assert HeadShards.even(3, 2).ranges == ((0, 2), (2, 1))
    assert HeadShards.even(2, 3).ranges == ((0, 1), (0, 1), (1, 1))


@pytest.mark.parametrize(
    ("num_heads", "ranges", "text"),
    [
        (4, ((0, 2),), "head 2 is missing"),
        (4, ((1, 3),), "head 0 is missing"),
        (4, ((0, 5),), "the heads of rank 0 is 5; it must be from 1 to 4"),
        (4, ((4, 1),), "the first head of rank 0 is 4"),
        (4, (), "ranges is"),
        (4, "ab", "ranges is"),
        (4, (3,), r"ranges\[0\] is 3"),
        (0, ((0, 1),), "num_kv_heads is 0"),
        (True, ((0, 1),), "num_kv_heads is True"),
    ],
)
def test_bad_shards_are_refused(num_heads: int, ranges: tuple[tuple[int, int], ...], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        HeadShards(num_heads, ranges)


def test_other_numbers_of_heads_are_refused_with_both() -> None:
    with pytest.raises(PeerMismatch, match="num_kv_heads is 4 at the sender, 2 here"):
        head_runs(HeadShards.even(4), HeadShards.even(2))
