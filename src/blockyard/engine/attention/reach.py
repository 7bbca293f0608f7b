"""What each sequence of a step reads in a layer group: all of its blocks, or those that a sliding window reaches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .interface import GroupRows, IntArray, StepShape


class Reach:
    """What each sequence reads: the blocks from the first that its window reaches, and positions counted from there.

    lengths: tokens from the first read block to the sequence's end, int64 (B,). firsts: position of the first of them.
    """

    def __init__(self, shape: StepShape, rows: GroupRows, block_size: int) -> None:
        self.shape = shape
        self.window = rows.sliding_window
        first_blocks = np.zeros_like(shape.num_computed)
        if self.window:
            # `windows.first_needed_block`, for all sequences at once.
            first_blocks = np.maximum(shape.num_computed - self.window + 1, 0) // block_size
        self._tables = rows.block_tables
        self._first_blocks = first_blocks
        self.firsts: IntArray = first_blocks * block_size
        self.lengths: IntArray = shape.seq_lens - self.firsts

    def tables(self, rows: IntArray) -> NDArray[np.int32]:
        """Block tables of `rows`, each from its first read block on; what stands behind a row's blocks says nothing."""
        if not self.window:
            return self._tables[rows]
        width = self._tables.shape[1]
        columns = self._first_blocks[rows][:, None] + np.arange(width - int(self._first_blocks[rows].min()))
        shifted: NDArray[np.int32] = self._tables[rows[:, None], np.minimum(columns, width - 1)]
        return shifted

    def hidden(self, positions: IntArray, num_keys: int) -> NDArray[np.bool_]:
        """For tokens at `positions` (any shape), counted like the keys: which of `num_keys` keys each must not see."""
        keys, own = np.arange(num_keys), positions[..., None]
        hidden: NDArray[np.bool_] = keys > own
        if self.window:
            hidden |= keys <= own - self.window
        return hidden
