"""What each block is at the moment of a snapshot: a number for each, from counts alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .snapshot import PoolCopy, Snapshot

#: The states, in the page's order; `NAMES[state]` is what it is called.
FREE, PRIVATE, SHARED, IDLE, PENDING, RETIRING, GONE, LOADING = range(8)
NAMES = ("free", "private", "shared", "idle", "pending", "retiring", "gone", "loading")
States = NDArray[np.uint8]
_BY_HELD_AND_CACHED = np.array([FREE, IDLE, PRIVATE, SHARED], np.uint8)


def block_states(snapshot: Snapshot) -> States:
    """The state of each block of the pool, uint8, in order of ids from block 1. O(num_blocks + held blocks).

    FREE: held by none, holds nothing that can be hit. PRIVATE: held, and not in the prefix index. SHARED: held, in the
    index and computed: any prompt can hit it. IDLE: held by none, still cached. PENDING: in the index, and to be
    computed by a sequence. RETIRING: held beyond the end of a pool that shrank. GONE: beyond it and free. LOADING:
    held, and filled from the CPU pool in this step.
    """
    states = pool_states(snapshot.pool)
    pending = _pending(snapshot)[1:]
    states[pending & (states == SHARED)] = PENDING
    loading = snapshot.around.loading - 1
    loading = loading[(loading >= 0) & (loading < len(states))]
    states[loading[snapshot.pool.ref_counts[1:][loading] > 0]] = LOADING
    return states


def pool_states(pool: PoolCopy) -> States:
    """The same from the counts of a pool alone, where nothing is to be computed. O(num_blocks)."""
    held, cached = pool.ref_counts[1:] > 0, pool.cached[1:]
    states: States = _BY_HELD_AND_CACHED[2 * held.view(np.uint8) + cached.view(np.uint8)]
    beyond = slice(pool.num_blocks - 1, None)
    states[beyond] = np.where(held[beyond], RETIRING, GONE)
    return states


def counts_of(states: States) -> list[int]:
    """How many blocks are in each state, in the order of `NAMES`. O(num_blocks)."""
    counts: list[int] = np.bincount(states, minlength=len(NAMES)).tolist()
    return counts


def _pending(snapshot: Snapshot) -> NDArray[np.bool_]:
    """Blocks that some sequence has not computed yet: their owner. One that joined it counts them as its hit, and what
    leases alone hold is computed."""
    pending = np.zeros(len(snapshot.pool.ref_counts), np.bool_)
    if snapshot.is_plain:  # elsewhere, blocks are indexed once they are computed
        for row in snapshot.rows:
            pending[row.block_ids[0][row.num_computed // snapshot.block_size :]] = True
    return pending
