"""What the page shows of each block at the moment of a snapshot: a number for each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..answers import BlockState
from .snapshot import PoolCopy, Snapshot

#: The page's states are those of `BlockState`. Three bits leave no room for fenced blocks: the page says private.
LOADING = 7
NAMES = ("free", "private", "shared", "idle", "pending", "retiring", "gone", "loading")
States = NDArray[np.uint8]


def block_states(snapshot: Snapshot) -> States:
    """The state of each block of the pool, uint8, in order of ids from block 1. O(num_blocks).

    See `BlockState`. LOADING: held, and filled from the CPU pool in this step.
    """
    states = pool_states(snapshot.pool)
    loading = snapshot.around.loading - 1
    loading = loading[(loading >= 0) & (loading < len(states))]
    states[loading[snapshot.pool.ref_counts[1:][loading] > 0]] = LOADING
    return states


def pool_states(pool: PoolCopy) -> States:
    """The same of a pool that nothing is loaded into; a block that only a step in flight keeps is private."""
    states = pool.states[1:].copy()
    states[states == BlockState.FENCED] = BlockState.PRIVATE
    return states


def counts_of(states: States) -> list[int]:
    """How many blocks are in each state, in the order of `NAMES`. O(num_blocks)."""
    counts: list[int] = np.bincount(states, minlength=len(NAMES)).tolist()
    return counts
