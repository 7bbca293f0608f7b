"""Leases that are split, that release blocks before a window, and that are freed to the tail of the queue."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import BlockPool, DoubleFree, ForeignBlock, InvalidArgument, PolicyError
from blockyard_testing.own_policies import MRU

from ..support.checked import prompt
from ..support.pools import cached, order
from ..support.snapshot import snapshot

SIZE = 4
TOKENS = prompt(1, 40)


def found(pool: BlockPool, tokens: Any) -> list[int]:
    pool.check()
    return pool.find_cached_blocks(tokens).block_ids.tolist()


# ---------------------------------------------------------------- release


def test_null_block_replaces_released_blocks() -> None:
    pool = BlockPool(10, SIZE)
    lease = pool.get_new_blocks(5)
    assert pool.release(lease, 0, 2) == 2
    assert (list(lease), len(lease), lease.block_ids.tolist()) == ([0, 0, 3, 4, 5], 5, [0, 0, 3, 4, 5])
    assert order(pool) == [1, 2, 6, 7, 8, 9]
    assert pool.release(lease, 1, 4) == 2, "one of the three is released already"
    assert pool.release(lease, 0) == 1
    assert pool.release(lease, 0) == 0
    assert pool.release(lease, 5) == 0
    assert pool.num_used_blocks == 0
    assert list(lease) == [0] * 5
    pool.free_blocks(lease)
    with pytest.raises(DoubleFree):
        pool.release(lease, 0)
    pool.check()


def test_a_window_moves_along_a_long_sequence() -> None:
    """Blocks before the window serve other prompts; caching continues after the last cached block."""
    pool = BlockPool(9, SIZE)
    lease = pool.get_new_blocks(0)
    for number in range(30):
        pool.extend(lease, 1)
        tokens = prompt(1, 200)[number * SIZE : (number + 1) * SIZE]
        assert pool.cache_next_blocks(lease, tokens, lease.num_cached_blocks) == number + 1
        if number >= 3:
            pool.release(lease, number - 3, number - 2)
        assert pool.num_used_blocks == min(number + 1, 3)
    assert len(lease) == 30
    pool.check()
    pool.free_blocks(lease)
    assert pool.num_used_blocks == 0


def test_caching_continues_after_a_released_block() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:12])
    pool.extend(lease, 1)
    pool.release(lease, 0, 3)
    assert pool.cache_next_blocks(lease, TOKENS[12:16], lease.num_cached_blocks) == 4
    assert found(pool, TOKENS) == [1, 2, 3, 4], "the blocks before it are idle, and hit as long as they are there"


def test_released_position_cannot_be_cached() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:4])
    pool.extend(lease, 2)
    pool.release(lease, 1, 2)
    before = snapshot(pool)
    with pytest.raises(InvalidArgument, match="has released its block at position 1, so it cannot cache a block there"):
        pool.cache_next_blocks(lease, TOKENS[4:12], lease.num_cached_blocks)
    with pytest.raises(InvalidArgument, match="has released its block at position 1"):
        pool.cache_full_blocks(lease, TOKENS[:12], num_cached_blocks=1)
    with pytest.raises(InvalidArgument, match="position is 1; the lease has released that block"):
        pool.copy_on_write(lease, 1)
    assert snapshot(pool) == before


def test_part_with_released_positions_is_shared_and_freed() -> None:
    pool = BlockPool(10, SIZE)
    lease = pool.get_new_blocks(4)
    pool.release(lease, 1, 2)
    part = pool.touch(lease, holder="part", start=1)
    assert list(part) == [0, 3, 4]
    assert pool.ref_counts()[:5].tolist() == [0, 1, 0, 2, 2]
    assert pool.block(0).holders == []
    pool.free_blocks(lease)
    pool.free_blocks(part)
    assert pool.num_used_blocks == 0
    pool.check()


# ---------------------------------------------------------------- split


def test_a_lease_is_cut_in_two() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:12], "head")
    tail = pool.split(lease, 1, holder="tail")
    assert (list(lease), lease.num_cached_blocks, lease.first_block) == ([1], 1, 0)
    assert (list(tail), tail.num_cached_blocks, tail.first_block, tail.holder) == ([2, 3], 2, 1, "tail")
    assert [each.holder for each in pool.leases()] == ["head", "tail"]
    assert pool.ref_counts()[:4].tolist() == [0, 1, 1, 1]
    for each in (lease, tail):
        pool.extend(each, 1)
    assert pool.cache_next_blocks(tail, TOKENS[12:16], tail.num_cached_blocks) == 3
    assert pool.cache_next_blocks(lease, prompt(2, 4), lease.num_cached_blocks) == 2
    assert found(pool, TOKENS) == [1, 2, 3, 5]
    assert found(pool, TOKENS[:4] + prompt(2, 4)) == [1, 4]


def test_rejected_drafts_are_cut_off_and_freed() -> None:
    """The lease is shorter then, and grows on from there."""
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:8])
    pool.extend(lease, 3)
    pool.free_blocks(pool.split(lease, 3))
    assert (list(lease), len(lease), lease[-1]) == ([1, 2, 3], 3, 3)
    assert pool.extend(lease, 1).tolist() == [4]
    assert list(lease) == [1, 2, 3, 4]
    assert pool.cache_next_blocks(lease, TOKENS[8:16], lease.num_cached_blocks) == 4


@pytest.mark.parametrize("at", [0, 3])
def test_a_cut_at_an_end_leaves_an_empty_lease(at: int) -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:12])
    tail = pool.split(lease, at)
    assert (list(lease), list(tail)) == ([1, 2, 3][:at], [1, 2, 3][at:])
    pool.extend(tail, 1)
    assert pool.cache_next_blocks(tail, TOKENS[12:16], tail.num_cached_blocks) == 4 - at
    assert found(pool, TOKENS) == [1, 2, 3, 4]
    pool.free_blocks(lease)
    pool.free_blocks(tail)
    assert pool.num_used_blocks == 0


def test_a_tail_whose_head_was_not_cached_up_to_it_does_not_go_on() -> None:
    """Its blocks could be indexed under a prefix that nobody has compared."""
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:4])
    pool.extend(lease, 2)
    tail = pool.split(lease, 2)
    with pytest.raises(InvalidArgument, match="does not know the content before block 2 of the prompt"):
        pool.cache_next_blocks(tail, TOKENS[8:12], tail.num_cached_blocks)
    with pytest.raises(InvalidArgument, match="lease begins with block 2 of its prompt"):
        pool.cache_full_blocks(tail, TOKENS[:4])


def test_a_cut_behind_a_released_window_forgets_what_stood_there() -> None:
    """After the cut other blocks stand at those places: the old content is not what comes before them."""
    pool = BlockPool(12, SIZE)
    lease = cached(pool, TOKENS[:12])
    pool.release(lease, 0, 3)
    pool.free_blocks(pool.split(lease, 1))
    pool.extend(lease, 3)
    assert lease[0] == 0
    with pytest.raises(InvalidArgument, match="does not know the content before block 1 of the prompt"):
        pool.cache_next_blocks(lease, prompt(2, 4), lease.num_cached_blocks)
    pool.check()


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("split", {"at": 4}, "at is 4; it must be from 0 to the 3 blocks of the lease"),
        ("split", {"at": -1}, "at is -1"),
        ("split", {"at": 1, "holder": b""}, "holder is b''"),
        ("split", {"at": None}, "at is None"),
        ("release", {"start": 4}, "start is 4 and stop is 3; both must be from 0 to the 3 blocks of the lease"),
        ("release", {"start": -1}, "start is -1"),
        ("release", {"start": 1, "stop": 0}, "stop is 0"),
        ("release", {"start": 1, "stop": 4}, "start is 1 and stop is 4; both must be"),
        ("release", {"start": True}, "start is True"),
        ("free_blocks", {"last": 1}, "last is 1; it must be True or False"),
    ],
)
def test_bad_arguments_change_nothing(name: str, arguments: dict[str, Any], text: str) -> None:
    pool, other = BlockPool(10, SIZE), BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:12])
    foreign = other.get_new_blocks(3)
    before = snapshot(pool)
    with pytest.raises(InvalidArgument, match=f"^{text}"):
        getattr(pool, name)(lease, **arguments)
    with pytest.raises(ForeignBlock):
        getattr(pool, name)(foreign, *{"split": (0,), "release": (0,), "free_blocks": ()}[name])
    assert snapshot(pool) == before


# ---------------------------------------------------------------- to the end of the queue


def test_uncached_blocks_are_freed_to_the_tail_on_request() -> None:
    pool = BlockPool(8, SIZE)
    lease = cached(pool, TOKENS[:8])
    pool.extend(lease, 2)
    other = cached(pool, prompt(2, 4))
    pool.free_blocks(lease, last=True)
    assert order(pool) == [6, 7, 4, 3, 2, 1]
    pool.free_blocks(other)
    assert order(pool) == [6, 7, 4, 3, 2, 1, 5], "what is freed later comes behind them"


def test_uncached_blocks_are_next_in_the_order_in_which_they_stood() -> None:
    pool = BlockPool(8, SIZE)
    pool.free_blocks(pool.get_new_blocks(3))
    assert order(pool) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("policy", ["fifo", "lfu", "s3fifo", "arc", "score", "density", MRU])
def test_a_policy_names_no_block_that_was_freed_to_the_end(policy: Any) -> None:
    """Cached blocks go first, as the policy says; then those at the end, which it knows nothing of."""
    pool = BlockPool(8, SIZE, eviction_policy=policy)
    pool.free_blocks(cached(pool, TOKENS[:8]))
    kept = pool.get_new_blocks(3)
    pool.free_blocks(kept, last=True)
    pool.free_blocks(cached(pool, prompt(2, 8)))
    pool.check()
    taken = pool.get_new_blocks(4)
    assert sorted([*taken]) == [1, 2, 6, 7]
    rest = pool.get_new_blocks(3)
    assert sorted([*rest]) == [3, 4, 5]
    pool.check()


def test_a_broken_policy_is_not_asked_where_nothing_cached_is_idle() -> None:
    class Broken(MRU):
        def evict(self) -> int:
            raise RuntimeError("no idea")

    pool = BlockPool(4, SIZE, eviction_policy=Broken)
    pool.free_blocks(pool.get_new_blocks(3), last=True)
    assert len(pool.get_new_blocks(2)) == 2
    idle = cached(pool, TOKENS[:4])
    pool.free_blocks(idle)
    before = pool.free_block_ids().tolist()
    with pytest.raises(PolicyError):
        pool.evict(1)
    assert pool.free_block_ids().tolist() == before
    pool.check()
