"""What each block is: the table of `BlockLedger` as one array."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ...answers import BlockState
from ..arrays import view_i32, view_i64
from .ledger import BlockLedger

_BY_HELD_AND_CACHED: Final = np.array(
    [BlockState.FREE, BlockState.IDLE, BlockState.PRIVATE, BlockState.SHARED], np.uint8
)


def block_states(ledger: BlockLedger) -> npt.NDArray[np.uint8]:
    """The `BlockState` of every id, uint8 (capacity,). O(capacity)."""
    counts = view_i32(ledger.ref_cnt)
    held = counts > 0
    cached = view_i64(ledger.index.identity)[: 2 * len(counts) : 2] != 0
    states: npt.NDArray[np.uint8] = _BY_HELD_AND_CACHED[2 * held.view(np.uint8) + cached.view(np.uint8)]
    if ledger.index.num_pending > 0:
        states[view_i32(ledger.index.owner)[: len(counts)] > 0] = BlockState.PENDING
    fence = ledger.fence
    if fence is not None and fence.num_blocks > 0:
        kept = (view_i64(fence.until)[: len(counts)] > 0) & (counts == 1)
        states[kept & (states == BlockState.PRIVATE)] = BlockState.FENCED
    end = ledger.num_blocks
    states[end:] = np.where(held[end:], BlockState.RETIRING, BlockState.GONE)
    states[0] = BlockState.GONE
    return states
