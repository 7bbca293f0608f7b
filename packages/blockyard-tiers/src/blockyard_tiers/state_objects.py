"""Objects made of the states of a hybrid model, in the rows of `KVBlocks`.

Needs torch: `pip install 'blockyard[engine]'`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from blockyard.storage import StateSlots

from .kv_blocks import IsDone, KVBlocks


class StateObjects:
    """States as objects. Each takes as many rows of `KVBlocks` as it takes blocks of the pool.

    Args:
        blocks: the blocks of the same `KVCache`.
        slots: the working states of its sequences.
    """

    def __init__(self, blocks: KVBlocks, slots: StateSlots) -> None:
        cache = blocks.kv_cache
        self._blocks, self._slots = blocks, slots
        self._part_bytes = cache.bytes_per_block
        #: Bytes of an object, and the rows that it takes.
        self.object_bytes = slots.num_bytes
        self.num_rows = -(-slots.num_bytes // cache.bytes_per_block)
        #: The pool as bytes, (places, blocks, bytes of a block in a place).
        self._pool = cache.data.flatten(2).view(torch.uint8)

    def layout(self) -> list[Any]:
        return [[list(each.shape), str(each.dtype).removeprefix("torch.")] for each in self._slots.tensors]

    def buffers(self, rows: Sequence[int]) -> list[memoryview]:
        left = [min(self.object_bytes - at * self._part_bytes, self._part_bytes) for at in range(self.num_rows)]
        return [self._blocks.buffer(row)[:size] for row, size in zip(rows, left, strict=True)]

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        self._blocks.kv_cache.finish_moves()
        for row, block in zip(rows, block_ids.tolist(), strict=True):
            self._part(row).copy_(self._pool[:, block], non_blocking=True)
        return self._blocks.mark()

    def write(self, slot: int, rows: Sequence[int], checkpoints: npt.NDArray[np.int32]) -> IsDone | None:
        """Copy a state from rows to a slot, and to the blocks of its checkpoint. O(bytes).

        Args:
            slot: the slot.
            rows: the rows.
            checkpoints: block ids, (n, blocks of a state); n is 0 or 1.
        """
        self._slots.fill(slot, [self._part(row) for row in rows])
        self._slots.save(np.full(len(checkpoints), slot, np.int32), checkpoints)
        return self._blocks.mark()

    def _part(self, row: int) -> torch.Tensor:
        """Return a row as a block of the pool, (places, bytes)."""
        return self._blocks.host(row)[: self._part_bytes].view(len(self._pool), -1)
