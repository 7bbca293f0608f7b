"""Blocks to cells: one each in a small pool, several adjacent ones in a large one, so that the wire stays small.

Each block has a state, a number, at the moment of a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.answers import BlockState

from .snapshot import PoolCopy, Snapshot

#: The page's states are those of `BlockState`. Three bits leave no room for fenced blocks: the page says private.
LOADING = 7
NAMES = ("free", "private", "shared", "idle", "pending", "retiring", "gone", "loading")
States = NDArray[np.uint8]


def block_states(snapshot: Snapshot) -> States:
    """Return the state of each block of the pool, uint8, in order of ids from block 1. O(num_blocks).

    See `BlockState`. LOADING: held, and filled from the CPU pool in this step.
    """
    states = pool_states(snapshot.pool)
    loading = snapshot.around.loading - 1
    loading = loading[(loading >= 0) & (loading < len(states))]
    states[loading[snapshot.pool.ref_counts[1:][loading] > 0]] = LOADING
    return states


def pool_states(pool: PoolCopy) -> States:
    """Return the same of a pool that nothing is loaded into; a block that only a step in flight keeps is private."""
    states = pool.states[1:].copy()
    states[states == BlockState.FENCED] = BlockState.PRIVATE
    return states


def counts_of(states: States) -> list[int]:
    """Return how many blocks are in each state, in the order of `NAMES`. O(num_blocks)."""
    counts: list[int] = np.bincount(states, minlength=len(NAMES)).tolist()
    return counts


#: Up to this many blocks are a cell each; beyond, there are no more cells than this.
MAX_SINGLE_CELLS = 4096
MAX_SHARED_CELLS = 2048
#: Bytes of a cell that stands for several blocks: four shares, and the highest count.
SHARED_CELL_BYTES = 5
#: The states that each share counts.
_SHARES = (
    (BlockState.PRIVATE, BlockState.RETIRING),
    (BlockState.SHARED,),
    (BlockState.IDLE,),
    (BlockState.PENDING, LOADING),
)
_LEVEL_SHIFT = 3
_MAX_LEVEL = 31


@dataclass(frozen=True, slots=True)
class Cells:
    """A pool as bytes for the wire.

    num_blocks: of the map, the null block left out. scale: blocks a cell; cell i is the blocks from 1 + i * scale.
    content: with scale 1 a byte a block: its state, and its count up to 31 in the upper five bits. Otherwise five
    bytes a cell: the shares of private (with retiring), shared, idle and pending (with loading) blocks in 255ths, at
    least 1 where there is one, and the highest count up to 255.
    """

    num_blocks: int
    scale: int
    content: bytes

    @property
    def width(self) -> int:
        """Bytes a cell."""
        return 1 if self.scale == 1 else SHARED_CELL_BYTES


def cells_of(states: States, ref_counts: NDArray[np.int32]) -> Cells:
    """Return the cells of a pool. ref_counts: without that of the null block. O(num_blocks)."""
    num_blocks = _end(states)
    states, counts = states[:num_blocks], ref_counts[:num_blocks]
    scale = 1 if num_blocks <= MAX_SINGLE_CELLS else -(-num_blocks // MAX_SHARED_CELLS)
    content = _singles(states, counts) if scale == 1 else _shares(states, counts, scale)
    return Cells(num_blocks, scale, content)


def _end(states: States) -> int:
    """Return the number of blocks up to the last that is there."""
    if len(states) and states[-1] != BlockState.GONE:
        return len(states)
    there = np.flatnonzero(states != BlockState.GONE)
    return int(there[-1]) + 1 if len(there) else 0


def _singles(states: States, counts: NDArray[np.int32]) -> bytes:
    levels = np.minimum(counts, _MAX_LEVEL).astype(np.uint8)
    return (states | (levels << _LEVEL_SHIFT)).astype(np.uint8).tobytes()


def _shares(states: States, counts: NDArray[np.int32], scale: int) -> bytes:
    num_cells = -(-len(states) // scale)
    sizes = np.full(num_cells, scale)
    sizes[-1] = len(states) - scale * (num_cells - 1)
    padding = num_cells * scale - len(states)
    table = np.pad(states, (0, padding), constant_values=BlockState.GONE).reshape(num_cells, scale)
    cells = np.empty((num_cells, SHARED_CELL_BYTES), np.uint8)
    for place, members in enumerate(_SHARES):
        found = sum(np.count_nonzero(table == member, axis=1) for member in members)
        cells[:, place] = np.ceil(255 * found / sizes)
    highest = np.pad(counts, (0, padding)).reshape(num_cells, scale).max(axis=1)
    cells[:, -1] = np.minimum(highest, 255)
    return cells.tobytes()
