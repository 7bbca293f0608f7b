"""`states()` agrees with the table of block states in the ledger, in all situations of pools and caches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from blockyard import BlockPool, CacheConfig, KVCacheManager
from blockyard.answers import BlockState
from blockyard.observe import describe_blocks, draw_pool
from blockyard_testing.live_caches import KINDS, at_work, live_cache
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt


def expected(cache: KVCacheManager, block_id: int) -> BlockState:
    """What one block is, by what `cache.block` says of it."""
    block = cache.block(block_id)
    if block_id == 0 or block_id >= cache.pool.num_blocks:
        return BlockState.RETIRING if block.ref_cnt else BlockState.GONE
    if block.ref_cnt == 0:
        return BlockState.IDLE if block.is_cached else BlockState.FREE
    if not block.is_computed:
        return BlockState.PENDING
    if block.is_cached:
        return BlockState.SHARED
    is_fenced = all(holder.endswith("in flight") for holder in block.holders)
    return BlockState.FENCED if is_fenced else BlockState.PRIVATE


def require_equal(cache: KVCacheManager) -> Counter[BlockState]:
    states = [BlockState(state) for state in cache.pool.states().tolist()]
    assert states == [expected(cache, block_id) for block_id in range(len(cache.pool.ref_counts()))]
    return Counter(states)


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_each_block(kind: str) -> None:
    cache, seen = live_cache(kind), Counter[BlockState]()
    for step, _ in enumerate(at_work(cache, run_seed(), 200)):
        if step % 50 == 40:
            cache.resize(20 if step % 100 == 40 else 40)
        seen += require_equal(cache)
    wanted = {BlockState.FREE, BlockState.PRIVATE, BlockState.SHARED, BlockState.IDLE, BlockState.GONE}
    assert wanted <= set(seen)


def test_blocks_that_wait_for_a_step_are_fenced_unless_they_are_cached() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=4, max_num_seqs=4, max_steps_in_flight=2))
    seq = cache.allocate(prompt(1, 6))
    plan = cache.reserve([seq])
    cache.commit([seq], plan.num_scheduled, step=plan.step)
    cache.free(seq)
    assert require_equal(cache) == {BlockState.SHARED: 1, BlockState.FENCED: 1, BlockState.FREE: 6, BlockState.GONE: 1}
    cache.end_step(plan.step)
    assert require_equal(cache) == {BlockState.IDLE: 1, BlockState.FREE: 7, BlockState.GONE: 1}


def test_what_is_held_beyond_the_end_retires() -> None:
    cache = Checked(num_blocks=9)
    leases = [cache.pool.get_new_blocks(1) for _ in range(8)]
    cache.pool.free_blocks(leases[5])
    cache.resize(4)
    assert cache.pool.states().tolist() == [6, 1, 1, 1, 5, 5, 6, 5, 5]
    require_equal(cache.cache)


def test_shared_means_held_and_cached_and_not_held_twice() -> None:
    """A cached block of one holder is shared, and what forks are to write into is not, in words and in pictures."""
    cache = Checked(num_blocks=9)
    first = cache.prefilled(prompt(1, 4))
    second = cache.prefilled(prompt(2, 3))
    cache.fork(second)
    assert [BlockState(state).name for state in cache.pool.states()[1:3]] == ["SHARED", "PRIVATE"]
    assert draw_pool(cache.cache).splitlines()[:3] == [
        "█▒······",
        "█ 1 shared: held and cached",
        "▒ 1 private: held, not cached",
    ]
    lines = describe_blocks(cache.cache).splitlines()
    assert lines[0].startswith("block 1: shared, ref_cnt 1, ")
    assert lines[1].startswith("block 2: private, ref_cnt 2, ")
    cache.free([first])


def test_pools_alone_have_states_too() -> None:
    pool = BlockPool(6, 4)
    lease = pool.get_new_blocks(3)
    pool.cache_full_blocks(lease, list(range(8)))
    states = pool.states()
    assert states.tolist() == [6, 2, 2, 1, 0, 0]
    assert states.dtype == np.uint8
    pool.free_blocks(lease)
    assert pool.states().tolist() == [6, 3, 3, 0, 0, 0]
    assert states.tolist() == [6, 2, 2, 1, 0, 0], "a copy"
