"""Blocks of a lease shared one by one, and made its own before they are written; the pool's own history."""

from __future__ import annotations

import numpy as np
import pytest

from blockyard import (
    BlockPool,
    CacheConfig,
    DoubleFree,
    ForeignBlock,
    InvalidArgument,
    KVCacheManager,
    ObserveConfig,
    OutOfBlocks,
    PolicyError,
)
from blockyard.observe import describe_blocks, describe_history, describe_leaks, draw_pool
from blockyard_testing.own_policies import MRU


def test_a_part_of_a_lease_is_shared() -> None:
    pool = BlockPool(10, 4)
    lease = pool.get_new_blocks(4, holder="a")
    part = pool.touch(lease, holder="b", start=1, stop=3)
    assert (list(part), part.holder) == ([2, 3], "b")
    assert pool.ref_counts()[:6].tolist() == [0, 1, 2, 2, 1, 0]
    assert list(pool.touch(lease, holder="c", start=4)) == []
    pool.free_blocks(lease)
    assert pool.num_used_blocks == 2
    pool.free_blocks(part)
    pool.check()


@pytest.mark.parametrize(
    ("start", "stop"), [(5, None), (-1, None), (2, 1), (0, 5), (1.5, None), (0, "2"), (True, None)]
)
def test_positions_outside_the_lease_are_refused(start: object, stop: object) -> None:
    pool = BlockPool(10, 4)
    lease = pool.get_new_blocks(4)
    with pytest.raises(InvalidArgument, match=r"^(start|stop) is"):
        pool.touch(lease, holder="", start=start, stop=stop)  # type: ignore[arg-type]
    assert pool.ref_counts().sum() == 4
    assert len(pool.leases()) == 1


def test_a_block_that_others_hold_is_replaced_by_a_copy() -> None:
    pool = BlockPool(10, 4)
    a = pool.get_new_blocks(2, holder="a")
    b = pool.touch(a, holder="b")
    assert pool.copy_on_write(b, 1) == (2, 3)
    assert (list(a), list(b)) == ([1, 2], [1, 3])
    assert pool.ref_counts()[:4].tolist() == [0, 2, 1, 1]
    assert pool.copy_on_write(b, 1) is None
    pool.free_blocks(a)
    assert pool.copy_on_write(b, 0) is None
    pool.free_blocks(b)
    pool.check()
    assert pool.num_allocated_blocks == pool.num_freed_blocks == 3


def test_a_cached_block_that_the_lease_holds_alone_leaves_the_index() -> None:
    pool = BlockPool(10, 4)
    lease = pool.get_new_blocks(2)
    pool.cache_full_blocks(lease, list(range(8)))
    assert pool.copy_on_write(lease, 1) is None
    assert pool.num_cached_tokens(list(range(8))) == 4
    hit = pool.get_cached_blocks(list(range(8)))
    assert pool.copy_on_write(lease, 0) == (1, 3)
    assert (list(hit), pool.num_cached_tokens(list(range(8)))) == ([1], 4)
    pool.check()


def test_a_copy_needs_a_free_block() -> None:
    pool = BlockPool(3, 4)
    a = pool.get_new_blocks(2)
    b = pool.touch(a)
    with pytest.raises(OutOfBlocks, match="block 2 is held 2 times, and none is free to copy it to"):
        pool.copy_on_write(b, 1)
    assert list(b) == [1, 2]
    pool.check()


def test_a_copy_evicts_as_the_policy_says_or_changes_nothing() -> None:
    pool = BlockPool(4, 4)
    pool.set_eviction_policy(MRU)
    idle = pool.get_new_blocks(2)
    pool.cache_full_blocks(idle, list(range(8)))
    pool.free_blocks(idle)
    a = pool.get_new_blocks(1)
    b = pool.touch(a)
    before = pool.num_evicted_blocks
    assert pool.copy_on_write(b, 0) is not None
    assert pool.num_evicted_blocks == before + 1
    pool.check()


@pytest.mark.parametrize("position", [-1, 2, 1.5, "0", None, True, 2**70])
def test_a_position_outside_the_lease_is_refused(position: object) -> None:
    pool = BlockPool(10, 4)
    lease = pool.get_new_blocks(2)
    with pytest.raises(InvalidArgument, match="position"):
        pool.copy_on_write(lease, position)  # type: ignore[arg-type]


def test_leases_of_others_and_freed_ones_are_refused() -> None:
    pool, other = BlockPool(10, 4), BlockPool(10, 4)
    lease = pool.get_new_blocks(2)
    with pytest.raises(ForeignBlock):
        other.copy_on_write(lease, 0)
    pool.free_blocks(lease)
    with pytest.raises(DoubleFree):
        pool.copy_on_write(lease, 0)
    with pytest.raises(DoubleFree):
        pool.touch(lease, holder="", start=0, stop=1)


def test_random_sharing_against_plain_counts() -> None:
    rng = np.random.default_rng(5)
    pool = BlockPool(40, 4)
    leases, held = [], []
    for _ in range(2000):
        action = rng.integers(4)
        if action == 0 and pool.num_free_blocks >= 3:
            leases.append(pool.get_new_blocks(int(rng.integers(1, 4))))
            held.append(list(leases[-1]))
        elif leases and action == 1:
            which = int(rng.integers(len(leases)))
            start = int(rng.integers(len(held[which]) + 1))
            stop = int(rng.integers(start, len(held[which]) + 1))
            leases.append(pool.touch(leases[which], holder="", start=start, stop=stop))
            held.append(held[which][start:stop])
        elif leases and action == 2:
            which = int(rng.integers(len(leases)))
            if held[which] and pool.num_free_blocks:
                place = int(rng.integers(len(held[which])))
                is_shared = sum(blocks.count(held[which][place]) for blocks in held) > 1
                moved = pool.copy_on_write(leases[which], place)
                assert (moved is not None) == is_shared
                if moved is not None:
                    assert moved[0] == held[which][place]
                    held[which][place] = moved[1]
        elif leases:
            which = int(rng.integers(len(leases)))
            pool.free_blocks(leases.pop(which))
            held.pop(which)
        assert [list(lease) for lease in leases] == held
        counts = pool.ref_counts()
        assert all(counts[block] == sum(blocks.count(block) for blocks in held) for block in range(40))
        pool.check()


def test_a_pool_alone_has_a_history_a_picture_and_a_leak_report() -> None:
    pool = BlockPool(9, 4, history_size=10)
    a = pool.get_new_blocks(2, holder="a")
    b = pool.touch(a, holder="b", start=0, stop=1)
    pool.copy_on_write(b, 0)
    pool.cache_full_blocks(a, list(range(8)))
    pool.free_blocks(a)
    assert [(event.action, event.actor) for event in pool.history()] == [
        ("take", "get_new_blocks a"),
        ("share", "touch b"),
        ("take", "copy_on_write b"),
        ("release", "copy_on_write b"),
        ("release", "free_blocks a"),
    ]
    assert describe_history(pool).splitlines()[0].endswith("in all 3 blocks allocated, 2 freed")
    assert draw_pool(pool).splitlines()[0] == "░░▒·····"
    assert describe_leaks(pool).splitlines()[1:] == ["lease 2 'b': 1 blocks: 3"]
    assert describe_blocks(pool).splitlines() == [
        "block 1: idle, 4 tokens",
        "block 2: idle, 4 tokens",
        "block 3: private, ref_cnt 1, lease 'b'",
    ]


def test_reports_refuse_values_that_are_no_cache() -> None:
    for ask in (draw_pool, describe_leaks, describe_history, describe_blocks):
        with pytest.raises(InvalidArgument, match="cache is 'pool'; it must be a KVCacheManager or a pool"):
            ask("pool")  # type: ignore[arg-type]


def test_a_manager_s_pool_shows_the_manager_s_history() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=4, observe=ObserveConfig(history_size=5)))
    cache.allocate([1, 2, 3])
    assert cache.pool.history() == cache.history() != []


class Broken(MRU):
    def evict(self) -> int:
        raise RuntimeError("no")


def test_a_policy_that_fails_leaves_the_lease_as_it_was() -> None:
    pool = BlockPool(4, 4)
    pool.set_eviction_policy(Broken)
    idle = pool.get_new_blocks(2)
    pool.cache_full_blocks(idle, list(range(8)))
    pool.free_blocks(idle)
    a = pool.get_new_blocks(1)
    b = pool.touch(a)
    with pytest.raises(PolicyError, match="evict raised RuntimeError: no"):
        pool.copy_on_write(b, 0)
    assert list(a) == list(b)
    assert pool.ref_counts()[a[0]] == 2
    pool.check()
