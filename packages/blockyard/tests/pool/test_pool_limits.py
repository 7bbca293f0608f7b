"""The pool at its limits: frees that go wrong, sizes at both ends, counts that add up, and check() itself."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from blockyard import BlockLease, BlockPool, DoubleFree, ForeignBlock, InvalidArgument, InvariantError, OutOfBlocks
from blockyard.errors import LogicError
from blockyard_testing.seeds import run_seed

from ..support.checked import prompt
from ..support.pools import cached, order
from ..support.snapshot import snapshot

# ---------------------------------------------------------------- frees that go wrong


def refused(pool: BlockPool, error: type[LogicError], message: str, call: Callable[[], object]) -> None:
    before = snapshot(pool)
    with pytest.raises(error, match=message):
        call()
    assert snapshot(pool) == before
    pool.check()


def test_a_double_free_names_the_lease_its_holder_and_its_blocks() -> None:
    pool = BlockPool(6, 4)
    pool.get_new_blocks(1)
    lease = pool.get_new_blocks(2, holder="request 7")
    pool.free_blocks(lease)
    message = r"^lease 2 of 'request 7' on blocks \[2, 3\] was already freed$"
    refused(pool, DoubleFree, message, lambda: pool.free_blocks(lease))
    refused(pool, DoubleFree, message, lambda: pool.touch(lease))
    refused(pool, DoubleFree, message, lambda: pool.cache_full_blocks(lease, prompt(1, 8)))


def test_a_stale_lease_is_caught_though_its_blocks_have_a_new_holder() -> None:
    """The bug of vLLM and others: an id says nothing about who may free it, and the block would go to two owners."""
    pool = BlockPool(3, 4)
    stale = pool.get_new_blocks(2, holder="old")
    pool.free_blocks(stale)
    fresh = pool.get_new_blocks(2, holder="new")
    assert list(stale) == list(fresh)
    refused(pool, DoubleFree, r"lease 1 of 'old' on blocks \[1, 2\]", lambda: pool.free_blocks(stale))
    assert pool.ref_counts().tolist() == [0, 1, 1]
    assert pool.block(1).holders == ["new"]


def test_one_of_two_holders_cannot_free_twice() -> None:
    """The reference count alone would let it pass: it is above zero."""
    pool = BlockPool(3, 4)
    first = pool.get_new_blocks(1, holder="first")
    pool.touch(first, holder="second")
    pool.free_blocks(first)
    refused(pool, DoubleFree, "'first'", lambda: pool.free_blocks(first))
    assert pool.ref_counts().tolist() == [0, 1, 0]


def test_a_block_is_not_in_more_leases_than_its_count_can_say() -> None:
    pool = BlockPool(6, 4)
    lease = cached(pool, prompt(1, 8))
    found, most = pool.find_cached_blocks(prompt(1, 8)), 2**31 - 1 - 2**24
    # So many leases take more memory than there is; the count is set to what it would be.
    pool._ledger.ref_cnt[lease[1]] = most  # type: ignore[attr-defined]
    before = snapshot(pool)
    for hold in (
        lambda: pool.touch(lease),
        lambda: pool.touch(lease, holder="request", start=1, stop=2),
        lambda: pool.hold(found),
        lambda: pool.hold(found, extend_by=1),
        lambda: pool.get_cached_blocks(prompt(1, 8)),
        lambda: pool.get_cached_block(prompt(1, 8)),
    ):
        with pytest.raises(InvalidArgument, match=f"^block {lease[1]} is held {most} times; .* is {most}$"):
            hold()
        assert snapshot(pool) == before
    pool.free_blocks(pool.touch(lease, stop=1))
    pool.free_blocks(pool.hold(found, num_blocks=1))
    pool._ledger.ref_cnt[lease[1]] = 1  # type: ignore[attr-defined]
    pool.free_blocks(pool.touch(lease))
    pool.check()


def test_a_lease_of_another_pool_is_foreign() -> None:
    """Even where serial and blocks are the same in both pools."""
    pool, other = BlockPool(4, 4), BlockPool(4, 4)
    pool.get_new_blocks(1, holder="mine")
    foreign = other.get_new_blocks(1, holder="theirs")
    message = r"^lease 1 of 'theirs' was handed out by another pool$"
    refused(pool, ForeignBlock, message, lambda: pool.free_blocks(foreign))
    refused(pool, ForeignBlock, message, lambda: pool.touch(foreign))
    refused(pool, ForeignBlock, message, lambda: pool.cache_full_blocks(foreign, prompt(1, 4)))
    other.free_blocks(foreign)
    refused(pool, ForeignBlock, message, lambda: pool.free_blocks(foreign))


@pytest.mark.parametrize("lease", [None, 1, [1], np.array([1]), "lease"])
def test_an_id_is_no_lease(lease: object) -> None:
    pool = BlockPool(4, 4)
    pool.get_new_blocks(1)
    with pytest.raises(InvalidArgument, match=r"it must be a BlockLease, as get_new_blocks returns it"):
        pool.free_blocks(lease)
    assert pool.num_used_blocks == 1


def test_out_of_blocks_carries_its_numbers_and_changes_nothing() -> None:
    pool = BlockPool(6, 4)
    pool.get_new_blocks(2)
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match=r"^num_blocks is 4; only 3 of 5 blocks are free$") as caught:
        pool.get_new_blocks(4)
    assert (caught.value.num_needed, caught.value.num_free) == (4, 3)
    assert snapshot(pool) == before
    assert list(pool.get_new_blocks(3)) == [3, 4, 5], "and exactly what is free can still be had"


# ---------------------------------------------------------------- sizes, the null block, the view


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7, 16, 4096])
def test_pools_accept_every_block_size(block_size: int) -> None:
    """Odd sizes end in half a word, 1 is all halves, 4096 is the limit: full blocks hit, one token less does not."""
    pool = BlockPool(6, block_size)
    tokens = prompt(1, 3 * block_size + block_size // 2)
    lease = cached(pool, tokens)
    assert pool.num_cached_blocks == 3
    for length in (1, block_size, block_size + 1, 2 * block_size, 3 * block_size - 1, 3 * block_size, len(tokens)):
        assert pool.num_cached_tokens(tokens[:length]) == length // block_size * block_size
    for position in (0, block_size - 1, block_size, 2 * block_size - 1, 3 * block_size - 1):
        other = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
        assert pool.num_cached_tokens(other) == position // block_size * block_size
    assert pool.block(2).token_ids == tokens[block_size : 2 * block_size]
    pool.free_blocks(lease)
    tail = [] if block_size == 1 else [4]
    assert order(pool) == [*tail, *range(4 + len(tail), 6), 3, 2, 1]


def test_a_pool_of_two_blocks_has_one_to_give() -> None:
    pool = BlockPool(2, 4)
    assert pool.num_usable_blocks == 1
    lease = pool.get_new_blocks(1)
    assert list(lease) == [1]
    assert pool.usage == 1.0
    with pytest.raises(OutOfBlocks, match=r"^num_blocks is 1; only 0 of 1 blocks are free$"):
        pool.get_new_blocks(1)
    pool.cache_full_blocks(lease, prompt(1, 4))
    pool.free_blocks(lease)
    for number in range(2, 5):
        pool.free_blocks(cached(pool, prompt(number, 4)))
    assert pool.num_evicted_blocks == 3
    assert order(pool) == [1]


def test_the_null_block_is_never_given() -> None:
    pool = BlockPool(5, 4)
    for _ in range(3):
        lease = pool.get_new_blocks(4)
        assert sorted(lease) == [1, 2, 3, 4]
        pool.free_blocks(lease)
    null = pool.block(0)
    assert (null.is_null, null.is_free, null.is_cached, null.ref_cnt, null.holders) == (True, False, False, 0, [])
    assert repr(null) == "<KVCacheBlock 0 null>"
    assert 0 not in order(pool)


def test_snapshot_shows_a_blocks_state() -> None:
    pool = BlockPool(5, 4)
    lease = pool.get_new_blocks(2, holder="me")
    private = pool.block(1)
    assert repr(private) == "<KVCacheBlock 1 ref_cnt=1 holders=['me']>"
    assert (private.token_ids, private.block_hash, private.is_computed) == ([], None, True)
    pool.cache_full_blocks(lease, [1, 2, 3, 4])
    pool.touch(lease, holder="you")
    shared = pool.block(1)
    assert repr(shared) == "<KVCacheBlock 1 ref_cnt=2 cached=[1, 2, 3, 4] holders=['me', 'you']>"
    assert isinstance(shared.block_hash, int)
    assert repr(private) == "<KVCacheBlock 1 ref_cnt=1 holders=['me']>", "a view is a copy of its moment"
    for held in pool.leases():
        pool.free_blocks(held)
    idle = pool.block(1)
    assert (idle.is_free, idle.is_cached) == (True, True)
    assert repr(idle) == "<KVCacheBlock 1 free cached=[1, 2, 3, 4]>"
    assert repr(pool.block(2)) == "<KVCacheBlock 2 free>"


def test_views_show_later_changes_and_copies_do_not() -> None:
    pool = BlockPool(5, 4)
    counts, mask, free = pool.ref_counts(), pool.cached_mask(), pool.free_block_ids()
    cached(pool, prompt(1, 4))
    assert counts.tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        counts[1] = 0
    assert not mask.any()
    assert pool.cached_mask().tolist() == [False, True, False, False, False]
    assert free.tolist() == [1, 2, 3, 4]
    assert free.dtype == np.int32


def test_the_peak_is_the_most_ever_held_at_once() -> None:
    pool = BlockPool(8, 4)
    first = cached(pool, prompt(1, 12))
    pool.free_blocks(first)
    assert pool.peak_used_blocks == 3
    pool.get_new_blocks(2)
    assert pool.peak_used_blocks == 3
    pool.get_cached_blocks(prompt(1, 8))
    assert pool.peak_used_blocks == 4, "a revived block is held as much as a new one"
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(4)
    assert pool.peak_used_blocks == 4


def test_counts_always_add_up() -> None:
    """Random leases of random prompts; `order` holds every count against every other after each step."""
    draw = random.Random(run_seed())
    pool = BlockPool(20, 3)
    held: list[BlockLease] = []
    for _ in range(600):
        tokens = prompt(draw.randint(1, 4), draw.randint(1, 15))
        action = draw.randrange(4)
        if action == 0 and -(-len(tokens) // 3) <= pool.num_free_blocks:
            held.append(cached(pool, tokens))
        elif action == 1:
            held.append(pool.get_cached_blocks(tokens))
        elif action == 2 and held and draw.random() < 0.5:
            held.append(pool.touch(draw.choice(held)))
        elif held:
            pool.free_blocks(held.pop(draw.randrange(len(held))))
        order(pool)
        assert pool.ref_counts().sum() == sum(len(lease) for lease in held)
    for lease in held:
        pool.free_blocks(lease)
    assert sorted(order(pool)) == list(range(1, 20))


# ---------------------------------------------------------------- check() sees what is broken


def set_ref_cnt(block: int, count: int) -> Callable[[BlockPool], None]:
    def corrupt(pool: BlockPool) -> None:
        pool._ledger.ref_cnt[block] = count

    return corrupt


def queue_call(name: str, block: int) -> Callable[[BlockPool], None]:
    def corrupt(pool: BlockPool) -> None:
        getattr(pool._ledger.queue, name)(block)

    return corrupt


def set_identity(block: int, content: int) -> Callable[[BlockPool], None]:
    def corrupt(pool: BlockPool) -> None:
        pool._ledger.index.identity[2 * block] = content

    return corrupt


#: Blocks 1 and 2 are held, 3 is idle and cached, 4 and 5 are free.
CORRUPTIONS = {
    "a free block with a holder": (set_ref_cnt(4, 1), "^I1: block 4 has ref_cnt 1, in queue: True$"),
    "an idle block with a holder": (set_ref_cnt(3, 1), "^I1: block 3 has ref_cnt 1, in queue: True$"),
    "a held block without one": (set_ref_cnt(1, 0), "^I1: block 1 has ref_cnt 0, in queue: False$"),
    "a negative count": (set_ref_cnt(4, -1), "^I1: block 4 has ref_cnt -1, in queue: True$"),
    "the null block held": (set_ref_cnt(0, 1), "^I1: the null block is held, cached or free$"),
    "the null block cached": (set_identity(0, 1), "^I1: the null block is held, cached or free$"),
    "a held block in the queue": (queue_call("append", 2), "^I1: block 2 has ref_cnt 1, in queue: True$"),
    "a free block out of the queue": (queue_call("remove", 4), "^I1: block 4 has ref_cnt 0, in queue: False$"),
    "a block queued twice": (queue_call("append", 4), "^free queue: "),
    "a forgotten content": (set_identity(3, 0), "^index: 0 blocks have content, but num_indexed is 1$"),
    "an invented content": (set_identity(4, 2), "^index: 2 blocks have content, but num_indexed is 1$"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_check_finds_a_broken_pool(what: str) -> None:
    corrupt, message = CORRUPTIONS[what]
    pool = BlockPool(6, 4)
    held, idle = pool.get_new_blocks(2), cached(pool, prompt(1, 4))
    pool.free_blocks(idle)
    assert (list(held), order(pool)) == ([1, 2], [4, 5, 3])
    corrupt(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check()
