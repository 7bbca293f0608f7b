"""Cells of the map: one per block in a small pool, one per several blocks in a large one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.answers import BlockState

from .snapshot import PoolCopy, Snapshot

#: A state of the page besides those of `BlockState`. States have three bits, so fenced blocks are shown as private.
LOADING = 7
NAMES = ("free", "private", "shared", "idle", "pending", "retiring", "gone", "loading")
States = NDArray[np.uint8]


def block_states(snapshot: Snapshot) -> States:
    """Return the state of each block from block 1 on, uint8: a `BlockState` or LOADING. O(num_blocks)."""
    states = pool_states(snapshot.pool)
    loading = snapshot.status.loading - 1
    loading = loading[(loading >= 0) & (loading < len(states))]
    states[loading[snapshot.pool.ref_counts[1:][loading] > 0]] = LOADING
    return states


def pool_states(pool: PoolCopy) -> States:
    """Return the states of a pool without loads. A fenced block, which only a step in flight holds, is private."""
    states = pool.states[1:].copy()
    states[states == BlockState.FENCED] = BlockState.PRIVATE
    return states


def counts_of(states: States) -> list[int]:
    """Return the number of blocks in each state, in the order of `NAMES`. O(num_blocks)."""
    counts: list[int] = np.bincount(states, minlength=len(NAMES)).tolist()
    return counts


#: Up to this many blocks, each has its own cell.
MAX_SINGLE_CELLS = 4096
#: Maximum of cells in larger pools.
MAX_SHARED_CELLS = 2048
#: Bytes of a cell with several blocks: four fractions and the highest reference count.
SHARED_CELL_BYTES = 5
#: The states in each fraction.
_FRACTIONS = (
    (BlockState.PRIVATE, BlockState.RETIRING),
    (BlockState.SHARED,),
    (BlockState.IDLE,),
    (BlockState.PENDING, LOADING),
)
_LEVEL_SHIFT = 3
_MAX_LEVEL = 31


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a pool, as bytes for the wire.

    Attributes:
        num_blocks: blocks of the map, without the null block.
        scale: blocks per cell; cell i has the blocks from 1 + i * scale on.
        content: with scale 1, one byte per block: its state, and its reference count up to 31 in the upper five bits.
            Otherwise five bytes per cell: the fractions of private (with retiring), shared, idle and pending (with
            loading) blocks in 255ths, at least 1 if there is any, and the highest reference count up to 255.
    """

    num_blocks: int
    scale: int
    content: bytes

    @property
    def width(self) -> int:
        """Bytes per cell."""
        return 1 if self.scale == 1 else SHARED_CELL_BYTES


def cells_of(states: States, ref_counts: NDArray[np.int32]) -> Cells:
    """Return the cells of a pool; `ref_counts` are without the null block's. O(num_blocks)."""
    num_blocks = _end(states)
    states, counts = states[:num_blocks], ref_counts[:num_blocks]
    scale = 1 if num_blocks <= MAX_SINGLE_CELLS else -(-num_blocks // MAX_SHARED_CELLS)
    if scale == 1:
        levels = np.minimum(counts, _MAX_LEVEL).astype(np.uint8)
        content = (states | (levels << _LEVEL_SHIFT)).astype(np.uint8).tobytes()
    else:
        content = _fractions(states, counts, scale)
    return Cells(num_blocks, scale, content)


def _end(states: States) -> int:
    if len(states) and states[-1] != BlockState.GONE:
        return len(states)
    there = np.flatnonzero(states != BlockState.GONE)
    return int(there[-1]) + 1 if len(there) else 0


def _fractions(states: States, counts: NDArray[np.int32], scale: int) -> bytes:
    num_cells = -(-len(states) // scale)
    sizes = np.full(num_cells, scale)
    sizes[-1] = len(states) - scale * (num_cells - 1)
    padding = num_cells * scale - len(states)
    table = np.pad(states, (0, padding), constant_values=BlockState.GONE).reshape(num_cells, scale)
    cells = np.empty((num_cells, SHARED_CELL_BYTES), np.uint8)
    for column, members in enumerate(_FRACTIONS):
        found = sum(np.count_nonzero(table == member, axis=1) for member in members)
        cells[:, column] = np.ceil(255 * found / sizes)
    highest = np.pad(counts, (0, padding)).reshape(num_cells, scale).max(axis=1)
    cells[:, -1] = np.minimum(highest, 255)
    return cells.tobytes()
