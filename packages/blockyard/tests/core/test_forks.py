"""Forks, cuts and copy-on-write: nobody writes into a block that another holds (I7), and nothing is copied in vain."""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, OutOfRows, SeqStatus, SequenceNotReady
from blockyard_testing.cached import cached_tokens

from ..support.checked import Checked, prompt
from ..support.snapshot import refused

SCHEDULED, NO_BLOCKS = SeqStatus.SCHEDULED, SeqStatus.NO_BLOCKS


# ---------------------------------------------------------------- fork


def test_a_fork_shares_all_blocks() -> None:
    cache = Checked()
    parent = cache.prefilled(prompt(1, 6), [7])
    children = cache.fork(parent, 2)
    assert [cache.row(seq) for seq in (parent, *children)] == [[1, 2]] * 3
    assert cache.ref_counts(parent) == [3, 3]
    assert [cache.state(seq) for seq in children] == [(7, 6)] * 2
    assert [cache.tokens(seq) for seq in children] == [[*prompt(1, 6), 7]] * 2
    assert cache.num_used_blocks == 2


def test_first_writer_gets_a_copy_and_the_last_writes_in_place() -> None:
    """Three share block 2. Two copies are enough: who is left alone with the block keeps it."""
    cache = Checked()
    parent = cache.prefilled(prompt(1, 6), [7])
    second, third = cache.fork(parent, 2)
    plan = cache.reserve([second, parent, third], 1)
    assert plan.copies.tolist() == [[2, 3], [2, 4]]
    assert [cache.row(seq) for seq in (second, parent, third)] == [[1, 3], [1, 4], [1, 2]]
    assert plan.slot_mapping.tolist() == [4 * 3 + 2, 4 * 4 + 2, 4 * 2 + 2]
    cache.commit([second, parent, third], 1, [20, 10, 30])
    assert [cache.tokens(seq)[4:] for seq in (second, parent, third)] == [
        [104, 105, 7, token] for token in (20, 10, 30)
    ]
    assert cache.stats().num_copied_blocks == 2
    assert cache.reserve([second, parent, third], 1).copies.tolist() == []


def test_last_holder_writes_in_place() -> None:
    cache = Checked()
    parent = cache.prefilled(prompt(1, 6), [7])
    child = cache.fork(parent)[0]
    cache.free(parent)
    plan = cache.reserve([child], 1)
    assert (plan.copies.tolist(), plan.slot_mapping.tolist()) == ([], [10])
    assert cache.row(child) == [1, 2]


def test_copies_hold_the_tokens_too() -> None:
    """The index knows the tokens of a copied block: once both blocks are full, each is hit by its tokens."""
    cache = Checked()
    parent = cache.prefilled(prompt(1, 6), [7])
    child = cache.fork(parent)[0]
    for token in (8, 9):
        cache.reserve([parent, child], 1)
        cache.commit([parent, child], 1, [token, token + 10])
    assert cached_tokens(cache, [*prompt(1, 6), 7, 8]) == 8
    assert cached_tokens(cache, [*prompt(1, 6), 7, 18]) == 8
    assert list(cache.hold_cached([*prompt(1, 6), 7, 8])) == [1, 3]
    assert list(cache.hold_cached([*prompt(1, 6), 7, 18])) == [1, 2]


def test_a_block_in_which_nothing_is_computed_is_replaced_and_not_copied() -> None:
    """Block 2 holds one known token and no keys and values: there are no bytes to copy, only the token."""
    cache = Checked()
    parent = cache.allocate(prompt(1, 5))
    cache.reserve([parent], 4)
    cache.commit([parent], 4)
    child = cache.fork(parent)[0]
    plan = cache.reserve([parent, child], 1)
    assert plan.copies.tolist() == []
    assert [cache.row(seq) for seq in (parent, child)] == [[1, 3], [1, 2]]
    assert plan.slot_mapping.tolist() == [12, 8]
    assert cache.tokens(parent) == cache.tokens(child) == prompt(1, 5)
    assert cache.stats().num_copied_blocks == 0


def test_full_blocks_are_never_copied() -> None:
    """The fork is at the end of a block: the known last token waits in both rows, and each gets a new block for it."""
    cache = Checked()
    parent = cache.prefilled(prompt(1, 8), [7])
    child = cache.fork(parent)[0]
    assert cache.tokens(child) == [*prompt(1, 8), 7]
    plan = cache.reserve([parent, child], 1)
    assert plan.copies.tolist() == []
    assert [cache.row(seq) for seq in (parent, child)] == [[1, 2, 3], [1, 2, 4]]
    cache.commit([parent, child], 1, [8, 9])
    assert [cache.tokens(seq)[8:] for seq in (parent, child)] == [[7, 8], [7, 9]]


def test_parallel_sampling_appends_another_token_to_each() -> None:
    """All prompt tokens are computed, none is sampled yet: fork, then give each its own first token."""
    cache = Checked()
    parent = cache.prefilled(prompt(1, 6))
    seqs = [parent, *cache.fork(parent, 2)]
    cache.commit(seqs, 0, [11, 12, 13])
    assert [cache.tokens(seq) for seq in seqs] == [[*prompt(1, 6), token] for token in (11, 12, 13)]
    plan = cache.reserve(seqs, 1)
    assert plan.copies.tolist() == [[2, 3], [2, 4]]
    assert [cache.row(seq) for seq in seqs] == [[1, 3], [1, 4], [1, 2]]
    assert [cache.tokens(seq) for seq in seqs] == [[*prompt(1, 6), token] for token in (11, 12, 13)]


def test_one_token_can_wait_while_the_block_is_shared() -> None:
    """Nobody writes into a shared block, not even a token: one waits in its row, and a second has no place."""
    cache = Checked()
    parent = cache.prefilled(prompt(1, 5))
    child = cache.fork(parent)[0]
    with refused(
        cache.cache,
        InvalidArgument,
        match=r"^next_tokens\[0\] has 2 tokens for sequence \d+; only 1 fit until the next",
    ):
        cache.commit([child], 0, [[8, 9]])
    cache.commit([child], 0, [[8, -1]])
    with pytest.raises(InvalidArgument, match="only 0 fit until the next"):
        cache.commit([child], 0, [9])
    assert (cache.tokens(parent), cache.tokens(child)) == (prompt(1, 5), [*prompt(1, 5), 8])
    cache.compute(child, [9])
    assert (cache.tokens(parent), cache.tokens(child)) == (prompt(1, 5), [*prompt(1, 5), 8, 9])


def test_missing_block_for_a_copy_is_reported_separately() -> None:
    """One block is free: the first writer gets it, and the second no longer needs one."""
    cache = Checked(num_blocks=4)
    parent = cache.prefilled(prompt(1, 6), [7])
    child = cache.fork(parent)[0]
    hog = cache.allocate([9])
    plan = cache.reserve([parent, child], 1)
    assert plan.status.tolist() == [NO_BLOCKS, NO_BLOCKS]
    assert (plan.copies.tolist(), plan.slot_mapping.tolist()) == ([], [])
    assert [cache.row(seq) for seq in (parent, child)] == [[1, 2], [1, 2]]
    cache.free(hog)
    plan = cache.reserve([parent, child], 1)
    assert plan.status.tolist() == [SCHEDULED, SCHEDULED]
    assert plan.copies.tolist() == [[2, 3]]


def test_forks_have_separate_holders() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=20, block_size=4, max_model_len=64, max_num_seqs=8))
    first = cache.allocate([1, 2, 3], holder="chat")
    cache.commit([first], cache.reserve([first], [3]).num_scheduled)
    named = cache.fork(first, 2, holders=["chat, second", "chat, third"])
    unnamed = cache.fork(first)
    assert cache.running() == dict(
        zip([first, *named, *unnamed], ["chat", "chat, second", "chat, third", "chat"], strict=True)
    )
    for holders in (["one"], "ab", [1, 2], None):
        with pytest.raises(InvalidArgument, match="holders"):
            cache.fork(first, 2, holders=holders)
    assert len(cache.running()) == 4
    cache.check()


def test_a_fork_of_a_fork() -> None:
    cache = Checked()
    first = cache.prefilled(prompt(1, 6), [7])
    second = cache.fork(first)[0]
    cache.reserve([second], 1)
    cache.commit([second], 1, [8])
    third = cache.fork(second)[0]
    assert cache.row(third) == [1, 3]
    cache.free([first, second])
    cache.compute(third, [9])
    assert cache.row(third) == [1, 3]
    assert cache.tokens(third) == [*prompt(1, 6), 7, 8, 9]


def test_blocks_of_rejected_drafts_are_not_shared() -> None:
    """Block 3 was given for drafts that were rejected: it holds nothing the child could want."""
    cache = Checked()
    parent = cache.prefilled(prompt(1, 6), [7])
    cache.reserve([parent], 6)
    cache.commit([parent], 1, [8])
    assert cache.row(parent) == [1, 2, 3]
    child = cache.fork(parent)[0]
    assert cache.row(child) == [1, 2]
    assert cache.ref_counts(parent) == [2, 2, 1]


def test_a_child_is_named_after_its_parent() -> None:
    cache = Checked()
    parent = cache.allocate(prompt(1, 4), holder="request 5")
    cache.compute(parent)
    children = cache.fork(parent, 2)
    assert cache.running() == dict.fromkeys([parent, *children], "request 5")


def test_uncomputed_sequence_cannot_be_forked() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 9))
    for reserved, computed, message in (
        (0, 0, "has computed 0 tokens; compute 8 first"),
        (5, 5, "has computed 5 tokens; compute 8 first"),
        (4, None, "has 4 reserved tokens; commit them first"),
    ):
        cache.reserve([seq], reserved)
        if computed is not None:
            cache.commit([seq], computed)
        with refused(cache.cache, SequenceNotReady, match=rf"^fork: sequence {seq} {message}$"):
            cache.fork(seq)
    cache.commit([seq], 4)
    cache.commit([seq], 0, [[1, 2]])
    with pytest.raises(
        SequenceNotReady, match=rf"^fork: sequence {seq} has computed 9 of 11 tokens; compute all but the last"
    ):
        cache.fork(seq)


def test_more_children_than_rows() -> None:
    cache = Checked(max_num_seqs=3)
    seq = cache.prefilled(prompt(1, 5))
    with refused(cache.cache, OutOfRows, match=r"^3 rows are needed, 2 are free"):
        cache.fork(seq, 3)
    assert len(cache.fork(seq, 2)) == 2


# ---------------------------------------------------------------- truncate


def test_truncation_frees_whole_blocks_after_the_cut() -> None:
    """Blocks 3 and 4 are after token 7: 4 is not cached and is put at the head, 3 is cached and is put at the tail."""
    cache = Checked(num_blocks=8)
    seq = cache.prefilled(prompt(1, 14))
    cache.truncate(seq, 7)
    assert cache.row(seq) == [1, 2]
    assert cache.state(seq) == (7, 7)
    assert cache.tokens(seq) == prompt(1, 7)
    assert cache.free_order() == [4, 5, 6, 7, 3]
    assert cached_tokens(cache, prompt(1, 12)) == 12, "what is computed can still be hit"


@pytest.mark.parametrize(
    ("length", "row"), [(1, [1]), (4, [1]), (5, [1, 2]), (8, [1, 2]), (9, [1, 2, 3]), (10, [1, 2, 3])]
)
def test_a_cut_keeps_the_block_of_its_last_token(length: int, row: list[int]) -> None:
    cache = Checked()
    seq = cache.prefilled(prompt(1, 10))
    cache.truncate(seq, length)
    assert (cache.row(seq), cache.state(seq)) == (row, (length, length))
    assert cache.tokens(seq) == prompt(1, length)


def test_truncation_to_all_tokens_frees_the_drafts_blocks() -> None:
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4), [7])
    cache.reserve([seq], 9)
    cache.commit([seq], 1, [8])
    assert cache.row(seq) == [1, 2, 3, 4]
    cache.truncate(seq, 6)
    assert (cache.row(seq), cache.state(seq)) == ([1, 2], (6, 5))
    assert cache.tokens(seq) == [*prompt(1, 4), 7, 8]


def test_truncation_drops_the_pending_token() -> None:
    cache = Checked()
    seq = cache.prefilled(prompt(1, 4), [7])
    cache.truncate(seq, 5)
    assert cache.tokens(seq) == [*prompt(1, 4), 7], "nothing is cut"
    cache.truncate(seq, 4)
    assert cache.tokens(seq) == prompt(1, 4)
    cache.commit([seq], 0, [8])
    assert cache.tokens(seq) == [*prompt(1, 4), 8]


def test_writing_after_a_cut_inside_a_shared_block_copies_it() -> None:
    """Both hold block 2. The first is cut inside it and goes on otherwise: it must not write where the other reads."""
    cache = Checked()
    first = cache.prefilled(prompt(1, 9))
    second = cache.prefilled(prompt(1, 10))
    assert (cache.row(first), cache.row(second)) == ([1, 2, 3], [1, 2, 4])
    cache.truncate(first, 6)
    cache.commit([first], 0, [7])
    assert cache.tokens(first) == [*prompt(1, 6), 7]
    assert cache.tokens(second) == prompt(1, 10)
    plan = cache.reserve([first], 2)
    assert plan.copies.tolist() == [[2, 3]], "block 3 came back by the cut and is free"
    assert plan.slot_mapping.tolist() == [14, 15]
    cache.commit([first], 2, [[8, 9]])
    assert cache.tokens(first) == [*prompt(1, 6), 7, 8, 9]
    assert cached_tokens(cache, prompt(1, 8)) == 8
    assert list(cache.hold_cached([*prompt(1, 6), 7, 8])) == [1, 3]


def test_writing_after_a_cut_inside_a_cached_block_uncaches_it() -> None:
    """Nobody else holds block 2, so it is written in place and no longer has the cached content."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 10))
    cache.truncate(seq, 6)
    cache.commit([seq], 0, [7])
    assert cached_tokens(cache, prompt(1, 8)) == 8, "the keys and values are there until they are overwritten"
    plan = cache.reserve([seq], 1)
    assert (plan.copies.tolist(), plan.slot_mapping.tolist()) == ([], [10])
    assert cache.row(seq) == [1, 2]
    assert cached_tokens(cache, prompt(1, 8)) == 4
    cache.commit([seq], 1, [8])
    cache.compute(seq)
    assert cache.tokens(seq) == [*prompt(1, 6), 7, 8]
    assert cached_tokens(cache, [*prompt(1, 6), 7, 8]) == 8


def test_a_hit_between_the_cut_and_the_write_saves_the_block() -> None:
    """Another takes block 2 while it still holds its content: then it is shared, and the writer gets a copy."""
    cache = Checked()
    seq = cache.prefilled(prompt(1, 10))
    cache.truncate(seq, 6)
    other = cache.allocate(prompt(1, 9))
    assert cache.row(other)[:2] == [1, 2]
    cache.commit([seq], 0, [7])
    plan = cache.reserve([seq], 1)
    assert plan.copies.tolist() == [[2, cache.row(seq)[1]]]
    assert cache.row(seq)[1] not in (1, 2, *cache.row(other))
    assert cache.tokens(other) == prompt(1, 9)


def test_a_cut_at_the_end_of_a_block_copies_nothing() -> None:
    cache = Checked()
    first, second = cache.prefilled(prompt(1, 9)), cache.prefilled(prompt(1, 9))
    cache.truncate(first, 8)
    cache.commit([first], 0, [7])
    plan = cache.reserve([first], 1)
    assert (plan.copies.tolist(), cache.row(first)) == ([], [1, 2, 3])
    assert cache.ref_counts(second) == [2, 2, 1]


def test_after_a_cut_the_same_tokens_can_be_computed_again() -> None:
    """Cut to six and grown by the very same tokens: the new block 2 is a duplicate, and the index takes it."""
    cache = Checked()
    first, second = cache.prefilled(prompt(1, 9)), cache.prefilled(prompt(1, 9))
    cache.truncate(first, 6)
    for position in (6, 7):
        cache.commit([first], 0, [prompt(1, 8)[position]])
        cache.compute(first)
    assert cache.tokens(first) == prompt(1, 8)
    assert cache.row(first) == [1, 3]
    assert cache.block(2).block_hash == cache.block(3).block_hash
    assert list(cache.hold_cached(prompt(1, 8))) == [1, 2]
    assert cache.ref_counts(second) == [3, 2, 1]


def test_unready_sequence_cannot_be_truncated() -> None:
    cache = Checked()
    seq = cache.allocate(prompt(1, 9))
    cache.reserve([seq], 5)
    for message in ("has 5 reserved tokens; commit them first", "has computed 5 tokens; compute 8 first"):
        with refused(cache.cache, SequenceNotReady, match=rf"^truncate: sequence {seq} {message}$"):
            cache.truncate(seq, 3)
        cache.commit([seq], min(5, cache.cache._parts.sequences.num_reserved[0]))
    cache.compute(seq)
    for length in (0, 10):
        with pytest.raises(InvalidArgument, match=rf"^num_tokens is {length}; it must be from 1 to 9$"):
            cache.truncate(seq, length)
