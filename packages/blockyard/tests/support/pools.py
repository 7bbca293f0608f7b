"""Shared by tests of pools: the eviction order, checked as it is read, and blocks with known tokens."""

from __future__ import annotations

import numpy as np

from blockyard import BlockLease, BlockPool


def order(pool: BlockPool) -> list[int]:
    """The free blocks in the order in which they will be allocated; and all counts agree with it."""
    pool.check()
    free = pool.free_block_ids().tolist()
    assert len(free) == pool.num_free_blocks
    assert pool.num_free_blocks + pool.num_used_blocks == pool.num_usable_blocks == pool.num_blocks - 1
    assert pool.num_used_blocks == np.count_nonzero(pool.ref_counts())
    assert pool.num_cached_blocks == np.count_nonzero(pool.cached_mask())
    assert pool.usage == pool.num_used_blocks / pool.num_usable_blocks
    return free


def cached(pool: BlockPool, tokens: list[int], holder: str = "") -> BlockLease:
    """New blocks that hold exactly these tokens, indexed where full."""
    lease = pool.get_new_blocks(-(-len(tokens) // pool.block_size), holder=holder)
    pool.cache_full_blocks(lease, tokens)
    return lease
