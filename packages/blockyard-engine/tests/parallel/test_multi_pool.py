"""A request over several pools: spread by free blocks, all or nothing, freed once, also after errors."""

from __future__ import annotations

import copy
import gc
import pickle
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard import (
    BlockPool,
    CacheConfig,
    ConcurrentCall,
    DoubleFree,
    ForeignBlock,
    InvalidArgument,
    InvariantError,
    KVCacheManager,
    OutOfBlocks,
    PolicyError,
)
from blockyard.policies import EvictionPolicy
from blockyard_engine.parallel import MultiBlockPool, MultiLease
from blockyard_testing import seeds


def pool_of(*free: int) -> MultiBlockPool:
    return MultiBlockPool([BlockPool(count + 1, 4) for count in free])


def spread(lease: MultiLease) -> list[int]:
    return [lease.num_blocks_of(device) for device in range(len(lease._owner.pools))]


def state(pool: MultiBlockPool) -> Any:
    return [(each.free_block_ids().tolist(), each.cached_mask().tolist(), len(each.leases())) for each in pool.pools]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_blocks_are_spread_by_what_is_free(free: list[int], data: st.DataObject) -> None:
    pool, total = pool_of(*free), sum(free)
    count = data.draw(st.integers(0, total))
    lease = pool.get_new_blocks(count)
    shares = spread(lease)
    assert sum(shares) == len(lease) == count
    for share, each in zip(shares, free, strict=True):
        assert count * each // total <= share <= -(-count * each // total), "within a block of its part"
    assert pool.num_free_blocks == total - count
    pool.check()
    pool.free_blocks(lease)
    assert state(pool) == state(pool_of(*free))


def test_equal_pools_get_equal_parts_and_the_first_the_remainder() -> None:
    assert spread(pool_of(10, 10, 10).get_new_blocks(11)) == [4, 4, 3]


def test_block_ids_have_their_device_in_the_order_of_the_request() -> None:
    pool = pool_of(4, 2)
    lease = pool.get_new_blocks(3)
    assert lease.block_ids.tolist() == [[0, 1], [0, 2], [1, 1]]
    pool.extend(lease, 2)
    assert lease.block_ids.tolist() == [[0, 1], [0, 2], [1, 1], [0, 3], [1, 2]]
    assert lease.block_ids.dtype == np.int32
    assert repr(lease) == "<MultiLease 1: [[0, 1], [0, 2], [1, 1], [0, 3], [1, 2]]>"
    assert pool.get_new_blocks(0).block_ids.shape == (0, 2)


def test_too_many_blocks_change_nothing() -> None:
    pool = pool_of(3, 5)
    lease = pool.get_new_blocks(2, holder="first")
    before = state(pool)
    for ask in (lambda: pool.get_new_blocks(7), lambda: pool.extend(lease, 7)):
        with pytest.raises(OutOfBlocks, match="num_blocks is 7; only 6 blocks are free in 2 pools") as caught:
            ask()
        assert (caught.value.num_needed, caught.value.num_free) == (7, 6)
    assert state(pool) == before
    assert pool.leases() == [lease]
    assert pool.usage == 0.25


def test_double_and_foreign_frees_are_caught() -> None:
    pool, other = pool_of(4, 4), pool_of(4, 4)
    lease = pool.get_new_blocks(4, holder="request")
    foreign = other.get_new_blocks(4, holder="stranger")
    with pytest.raises(ForeignBlock, match="'stranger' was handed out by another pool"):
        pool.free_blocks(foreign)
    pool.free_blocks(lease)
    again = pool.get_new_blocks(4)
    for call in (pool.free_blocks, lambda lease: pool.extend(lease, 1)):
        with pytest.raises(DoubleFree, match="lease 1 of 'request' was already freed"):
            call(lease)
    pool.check()
    assert pool.num_used_blocks == len(again)
    with pytest.raises(InvalidArgument, match="it must be a MultiLease"):
        pool.free_blocks(BlockPool(4).get_new_blocks(1))  # type: ignore[arg-type]


class Fails(EvictionPolicy):
    """Eviction policy that tracks idle blocks but returns no victim."""

    action: Any = None

    def __init__(self, num_blocks: int) -> None:
        pass

    def insert(self, block: int, key: int, depth: int) -> None:
        pass

    def hit(self, block: int, key: int) -> None:
        pass

    def remove(self, block: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def evict(self) -> int:
        if Fails.action is not None:
            Fails.action()
        raise RuntimeError("no victim today")


def cached_pool(policy: Any = "lru") -> BlockPool:
    """Return a pool of 4 blocks, all idle and cached."""
    pool = BlockPool(5, 2)
    pool.set_eviction_policy(policy)
    lease = pool.get_new_blocks(4)
    pool.cache_full_blocks(lease, list(range(8)))
    pool.free_blocks(lease)
    return pool


def test_a_policy_that_fails_on_the_third_pool_leaves_nothing_held() -> None:
    pools = [cached_pool(), cached_pool(), cached_pool()]
    pool = MultiBlockPool(pools)
    pools[2].set_eviction_policy(Fails)
    with pytest.raises(PolicyError):
        pool.get_new_blocks(9)
    assert pool.num_used_blocks == 0
    assert pool.leases() == []
    assert all(each.leases() == [] for each in pools)
    assert pools[2].num_cached_blocks == 4, "the pool that failed is as it was"
    pool.check()
    pools[2].set_eviction_policy("lru")
    pool.free_blocks(pool.get_new_blocks(12))
    pool.check()


@pytest.mark.parametrize("call", ["get_new_blocks", "extend"])
def test_a_policy_may_free_the_lease_during_a_call(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The free is deferred in the pool that asked; at the end nothing is held, and nothing was freed twice."""
    pools = [BlockPool(9, 2), cached_pool()]
    pool = MultiBlockPool(pools)
    lease = pool.get_new_blocks(2)
    pools[1].set_eviction_policy(Fails)
    monkeypatch.setattr(Fails, "action", lambda: pool.free_blocks(lease))
    with pytest.raises(PolicyError):
        pool.get_new_blocks(9) if call == "get_new_blocks" else pool.extend(lease, 9)
    pools[1].set_eviction_policy("lru")
    assert pool.num_used_blocks == 0
    assert pool.leases() == []
    pool.check()


def test_a_pool_in_the_middle_of_a_call_refuses_before_any_is_changed() -> None:
    pools = [cached_pool() for _ in range(3)]
    pool = MultiBlockPool(pools)
    seen: list[Any] = []

    class Holder:
        def __index__(self) -> int:
            before = state(MultiBlockPool(pools[:2]))
            with pytest.raises(ConcurrentCall):
                pool.get_new_blocks(9)
            seen.append(state(MultiBlockPool(pools[:2])) == before)
            return 1

    kept = pools[2].get_new_blocks(Holder())
    assert seen == [True]
    pools[2].free_blocks(kept)
    pool.check()


def test_a_free_inside_a_call_waits_for_its_end() -> None:
    pools = [BlockPool(9, 4) for _ in range(2)]
    pool = MultiBlockPool(pools)
    lease = pool.get_new_blocks(6)
    used: list[int] = []

    class Frees:
        def __index__(self) -> int:
            pool.free_blocks(lease)
            used.append(pool.num_used_blocks)
            return 1

    kept = pools[1].get_new_blocks(Frees())
    assert used == [3], "the other pool's are free at once"
    assert pool.num_used_blocks == 1
    pools[1].free_blocks(kept)
    pool.check()


def test_a_part_freed_elsewhere_is_reported_after_the_rest_is_freed() -> None:
    pool = pool_of(4, 4, 4)
    lease = pool.get_new_blocks(6)
    [part] = pool.pools[1].leases()
    pool.pools[1].free_blocks(part)
    with pytest.raises(InvariantError, match="no longer holds its blocks"):
        pool.check()
    with pytest.raises(DoubleFree):
        pool.free_blocks(lease)
    assert pool.num_used_blocks == 0
    pool.check()


def test_garbage_frees_its_blocks() -> None:
    pool = pool_of(20, 20)

    class Request:
        def __init__(self) -> None:
            self.lease = pool.get_new_blocks(5)
            self.me = self

        def __del__(self) -> None:
            pool.free_blocks(self.lease)

    for _ in range(40):
        Request()
        if pool.num_free_blocks < 10:
            gc.collect()
    gc.collect()
    assert pool.num_used_blocks == 0
    pool.check()


def test_managers_pools_can_be_spread_over() -> None:
    caches = [KVCacheManager(CacheConfig(num_blocks=20, block_size=4)) for _ in range(2)]
    seq = caches[0].allocate(range(40))
    pool = MultiBlockPool([cache.pool for cache in caches])
    lease = pool.get_new_blocks(10)
    assert spread(lease) == [3, 7]
    for cache in caches:
        cache.check()
    caches[0].free(seq)
    pool.free_blocks(lease)
    assert pool.num_used_blocks == 0


def test_leases_cannot_be_copied() -> None:
    lease = pool_of(4).get_new_blocks(1)
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="MultiLease"):
            call(lease)


@pytest.mark.parametrize("pools", [[], None, 3, [3], "ab", [BlockPool(4), BlockPool(4, 8)], [BlockPool(4)] * 2])
def test_bad_pools_are_refused(pools: Any) -> None:
    with pytest.raises(InvalidArgument, match="pools"):
        MultiBlockPool(pools)


@pytest.mark.parametrize("count", [-1, 1.5, True, None, "2", 2**60])
def test_bad_counts_are_refused(count: Any) -> None:
    pool = pool_of(4, 4)
    lease = pool.get_new_blocks(1)
    for call in (pool.get_new_blocks, lambda count: pool.extend(lease, count)):
        with pytest.raises(InvalidArgument, match="num_blocks is"):
            call(count)
    with pytest.raises(InvalidArgument, match="holder is"):
        pool.get_new_blocks(1, holder=5)  # type: ignore[arg-type]
    assert pool.num_used_blocks == 1


def test_random_operations_keep_all_invariants() -> None:
    draw = random.Random(seeds.run_seed())
    for _ in range(20):
        pool = pool_of(*(draw.randrange(1, 30) for _ in range(draw.randrange(1, 6))))
        leases: list[MultiLease] = []
        for _ in range(120):
            count = draw.randrange(12)
            kind = draw.random()
            free = pool.num_free_blocks
            try:
                if kind < 0.45:
                    leases.append(pool.get_new_blocks(count))
                elif kind < 0.6 and leases:
                    pool.extend(draw.choice(leases), count)
                elif leases:
                    pool.free_blocks(leases.pop(draw.randrange(len(leases))))
            except OutOfBlocks:
                assert count > free == pool.num_free_blocks
            assert pool.num_used_blocks == sum(map(len, leases))
            pool.check()
        for lease in leases:
            pool.free_blocks(lease)
        assert pool.num_used_blocks == 0
