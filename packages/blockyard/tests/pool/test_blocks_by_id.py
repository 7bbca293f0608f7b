"""Blocks that a caller names by their ids: uncached after a failed load, adopted, evicted on demand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, InvalidArgument, KVCacheManager, OutOfBlocks, StaleBlocks
from blockyard_testing.own_policies import MRU

from ..support.checked import prompt
from ..support.pools import cached, order
from ..support.snapshot import refused, snapshot

SIZE = 4
TOKENS = prompt(1, 40)


def found(pool: BlockPool, tokens: Any) -> list[int]:
    pool.check()
    return pool.find_cached_blocks(tokens).block_ids.tolist()


# ---------------------------------------------------------------- uncache


def test_a_held_block_whose_load_failed_is_computed_and_cached_again() -> None:
    """What follows it stays where it is, is hit by nobody, and comes back without being computed twice by anybody."""
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:16])
    assert pool.uncache([2]) == 1
    assert found(pool, TOKENS) == [1]
    assert pool.ref_counts()[:5].tolist() == [0, 1, 1, 1, 1]
    with pytest.raises(StaleBlocks) as error:
        pool.cache_next_blocks(lease, TOKENS[16:20], lease.num_cached_blocks)
    at = error.value.num_still_cached
    assert pool.cache_next_blocks(lease, TOKENS[at * SIZE : 16], at) == 4
    assert found(pool, TOKENS) == [1, 2, 3, 4]


def test_a_block_that_two_hold_is_cached_again_by_either() -> None:
    pool = BlockPool(10, SIZE)
    one = cached(pool, TOKENS[:12])
    two = pool.get_cached_blocks(TOKENS[:12])
    pool.uncache([1, 3])
    for lease in (one, two):
        with pytest.raises(StaleBlocks):
            pool.cache_next_blocks(lease, TOKENS[12:16], lease.num_cached_blocks)
    assert pool.cache_next_blocks(two, TOKENS[:12], 0) == 3
    assert found(pool, TOKENS) == [1, 2, 3]
    assert pool.cache_next_blocks(one, TOKENS[:12], 0) == 3, "it is there already"
    pool.extend(one, 1)
    assert pool.cache_next_blocks(one, TOKENS[12:16], one.num_cached_blocks) == 4
    assert found(pool, TOKENS) == [1, 2, 3, 4]


def test_it_is_given_no_other_tokens_while_others_hold_it() -> None:
    pool = BlockPool(10, SIZE)
    lease = cached(pool, TOKENS[:8])
    pool.touch(lease, holder="other")
    pool.uncache([2])
    with refused(pool, InvalidArgument, match="block 2 at position 1, which is held 2 times"):
        pool.cache_next_blocks(lease, prompt(2, 4), 1)


def test_idle_blocks_are_the_next_to_be_taken() -> None:
    pool = BlockPool(8, SIZE)
    pool.free_blocks(cached(pool, TOKENS[:16]))
    assert order(pool) == [5, 6, 7, 4, 3, 2, 1]
    assert pool.uncache([3, 1]) == 2
    assert order(pool) == [3, 1, 5, 6, 7, 4, 2]
    assert found(pool, TOKENS) == []
    assert pool.uncache([3, 1, 5]) == 0, "they cache nothing any more"
    assert (pool.num_cached_blocks, pool.num_evicted_blocks) == (2, 0)


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density", MRU])
def test_a_policy_forgets_what_is_uncached(policy: Any) -> None:
    pool = BlockPool(8, SIZE, eviction_policy=policy, retention_blocks=4)
    pool.free_blocks(cached(pool, TOKENS[:16]))
    assert pool.retain(TOKENS[:8]) == 2
    assert pool.uncache(np.array([2, 4, 2])) == 2
    assert pool.num_retained_blocks == 1
    pool.check()
    assert list(pool.get_new_blocks(2)) == [4, 2]
    assert sorted([*pool.get_new_blocks(5)]) == [1, 3, 5, 6, 7]
    assert (pool.num_cached_blocks, pool.num_retained_blocks) == (0, 0)
    pool.check()


# ---------------------------------------------------------------- adopt and evict


def test_a_cache_for_blocks_that_somebody_else_hands_out() -> None:
    """The other allocator has a list of free ids; the pool caches what it is given and names what goes."""
    pool = BlockPool(9, SIZE)
    outside = list(range(1, 9))
    for number in range(2):
        ids = [outside.pop() for _ in range(4)]
        lease = pool.adopt(ids, holder=f"request-{number}")
        assert (list(lease), lease.holder) == (ids, f"request-{number}")
        pool.cache_full_blocks(lease, prompt(number, 16))
        pool.free_blocks(lease)
    assert outside == []
    outside += pool.evict(3).tolist()
    assert outside == [5, 6, 7], "the oldest prompt's blocks, its end first"
    assert found(pool, prompt(0, 16)) == [8]
    again = pool.adopt(outside)
    pool.cache_full_blocks(again, prompt(3, 12))
    assert pool.find_cached_blocks(prompt(1, 16)).block_ids.tolist() == [4, 3, 2, 1]
    pool.check()


def test_what_is_adopted_loses_what_it_cached() -> None:
    pool = BlockPool(8, SIZE)
    pool.free_blocks(cached(pool, TOKENS[:12]))
    lease = pool.adopt([2, 6])
    assert order(pool) == [4, 5, 7, 3, 1]
    assert (found(pool, TOKENS), pool.num_evicted_blocks) == ([1], 1)
    pool.free_blocks(lease)
    assert pool.num_allocated_blocks == pool.num_freed_blocks == 5


def test_adopt_that_may_not_evict_refuses_what_is_cached() -> None:
    pool = BlockPool(8, SIZE)
    pool.free_blocks(cached(pool, TOKENS[:12]))
    before = snapshot(pool)
    with pytest.raises(
        InvalidArgument, match=r"^block_ids\[1\] is 2, which is cached; with may_evict=False it must not be$"
    ):
        pool.adopt([6, 2], may_evict=False)
    with pytest.raises(InvalidArgument, match="may_evict is 'no'"):
        pool.adopt([6], may_evict="no")
    assert snapshot(pool) == before
    assert list(pool.adopt([6, 4], holder="request", may_evict=False)) == [6, 4]
    pool.check()


def test_evicted_blocks_are_free_and_the_next_to_be_taken() -> None:
    pool = BlockPool(8, SIZE)
    pool.free_blocks(cached(pool, TOKENS[:12]))
    ids = pool.evict(2)
    assert (ids.tolist(), ids.dtype) == ([3, 2], np.int32)
    assert order(pool) == [3, 2, 4, 5, 6, 7, 1]
    assert pool.num_evicted_blocks == 2
    with refused(pool, OutOfBlocks, match="num_blocks is 2; only 1 blocks are cached and idle"):
        pool.evict(2)
    assert pool.evict(0).tolist() == []


def test_blocks_that_cache_nothing_stand_anywhere() -> None:
    """Before the idle ones, between them and behind: what is evicted is the next idle one in the order of the queue."""
    pool = BlockPool(40, SIZE)
    choose = random.Random(5)
    leases = []
    for number in range(400):
        act = choose.random()
        if act < 0.4 and pool.num_free_blocks >= 3:
            leases.append(pool.get_new_blocks(3))
            if choose.random() < 0.6:
                pool.cache_full_blocks(leases[-1], prompt(number, choose.choice((4, 8, 12))))
        elif act < 0.7 and leases:
            pool.free_blocks(leases.pop(choose.randrange(len(leases))), last=choose.random() < 0.5)
        elif act < 0.72:
            pool.reset_prefix_cache()
        else:
            cached_now = pool.cached_mask()
            idle = [block for block in order(pool) if cached_now[block]]
            count = choose.randint(0, min(len(idle), 3))
            assert pool.evict(count).tolist() == idle[:count]
            assert order(pool)[:count] == idle[:count]
            with pytest.raises(OutOfBlocks):
                pool.evict(len(idle) - count + 1)
        pool.check()


@pytest.mark.parametrize("policy", ["fifo", "lfu", "s3fifo", "arc", "score", "density", MRU])
def test_a_policy_chooses_what_is_evicted_on_demand(policy: Any) -> None:
    """The same blocks as an allocation would take."""
    taken = []
    for on_demand in (False, True):
        pool = BlockPool(10, SIZE, hash_seed=3, eviction_policy=policy)
        for number in (1, 2, 3):
            pool.free_blocks(cached(pool, prompt(number, 12)))
            pool.free_blocks(pool.get_cached_blocks(prompt(1, 8)))
        assert pool.num_free_blocks == pool.num_cached_blocks == 9
        if on_demand:
            taken.append(sorted(pool.evict(4).tolist()))
        else:
            taken.append(sorted([*pool.get_new_blocks(4)]))
        pool.check()
        with pytest.raises(OutOfBlocks):
            pool.evict(6)
        pool.check()
    assert taken[0] == taken[1]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("uncache", ([0],), r"block_ids\[0\] is 0; it must be from 1 to 7"),
        ("uncache", ([1, 8],), r"block_ids\[1\] is 8; it must be from 1 to 7"),
        ("uncache", ([-1],), r"block_ids\[0\] is -1"),
        ("uncache", ([2**62],), "block_ids"),
        ("uncache", ("12",), "block_ids"),
        ("uncache", (None,), "block_ids"),
        ("adopt", ([1],), r"block_ids\[0\] is 1, which is held 1 times"),
        ("adopt", ([5, 6, 5],), r"block_ids\[2\] is 5, which is given twice"),
        ("adopt", ([8],), r"block_ids\[0\] is 8; it must be from 1 to 7"),
        ("evict", (-1,), "num_blocks is -1"),
        ("evict", (1.0,), "num_blocks is 1.0"),
    ],
)
def test_bad_arguments_change_nothing(name: str, arguments: tuple[Any, ...], text: str) -> None:
    pool = BlockPool(8, SIZE)
    cached(pool, TOKENS[:8])
    with refused(pool, InvalidArgument, match=f"^{text}"):
        getattr(pool, name)(*arguments)


def test_bad_holder_is_refused() -> None:
    pool = BlockPool(8, SIZE)
    with refused(pool, InvalidArgument, match="^holder is 3"):
        pool.adopt([5], holder=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("uncache", ([1],)),
        ("adopt", ([1],)),
        ("evict", (1,)),
        ("retain", ([1],)),
        ("advance_time", (1.0,)),
        ("residency", ()),
        ("take_events", ()),
        ("reset_prefix_cache", ()),
    ],
)
def test_a_manager_does_these_itself(name: str, arguments: tuple[Any, ...]) -> None:
    assert hasattr(BlockPool, name)
    pool = KVCacheManager(CacheConfig(8, SIZE)).pool
    with pytest.raises(AttributeError, match=name):
        getattr(pool, name)(*arguments)
