"""Addresses in the KV tensors, checked and copied to the device once per step and used by every layer."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import InvalidArgument

IntArray = NDArray[np.int64]


def int_array(name: str, values: object, num_dims: int) -> IntArray:
    """Return `values` (list, numpy array or tensor of integers) as an int64 array of `num_dims` dimensions."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.size == 0 and isinstance(values, (list, tuple)):
        array = array.astype(np.int64)  # an empty list has no integers to show its type by
    if array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name} has dtype {array.dtype}; it must hold integers")
    if array.ndim != num_dims:
        raise InvalidArgument(f"{name} has shape {array.shape}; it must have {num_dims} dimension(s)")
    return array.astype(np.int64, copy=False)


def require_range(name: str, array: IntArray, low: int, high: int) -> None:
    """Raise `InvalidArgument` for the first entry of `array` that is not from `low` to `high`."""
    if array.size == 0 or (low <= array.min() and array.max() <= high):
        return
    flat = array.reshape(-1)
    position = int(np.argmax((flat < low) | (flat > high)))
    raise InvalidArgument(f"{name} holds {int(flat[position])} at position {position}; it must be from {low} to {high}")


class SlotAddresses:
    """Slots that a step's tokens are written to, one per token (`slot = block_id * block_size + offset`).

    Slots of the null block (below `block_size`) are rejected: padding relies on its zeros.
    """

    def __init__(self, slot_mapping: object, num_blocks: int, block_size: int, device: torch.device) -> None:
        slots = int_array("slot_mapping", slot_mapping, 1)
        require_range("slot_mapping", slots, block_size, num_blocks * block_size - 1)
        block_ids, offsets = np.divmod(slots, block_size)
        self.num_tokens = len(slots)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_ids = torch.from_numpy(block_ids).to(device)
        self.offsets = torch.from_numpy(offsets).to(device)
        # Rows of a layer viewed as (num_blocks * 2 * block_size) tokens: a block's keys, then its values.
        key_rows = block_ids * (2 * block_size) + offsets
        self.key_rows = torch.from_numpy(key_rows).to(device)
        self.value_rows = torch.from_numpy(key_rows + block_size).to(device)


class TableAddresses:
    """Blocks that a gather reads: `seq_lens[i]` tokens through row i of `block_tables`, followed by zeros.

    After a sequence's last token, its block still holds data of an earlier holder. Attention masks hide such values,
    but not NaN or infinity (0 * NaN is NaN), so they must not be read.
    """

    def __init__(
        self, block_tables: object, seq_lens: object, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        tables = int_array("block_tables", block_tables, 2)
        lengths = int_array("seq_lens", seq_lens, 1)
        _require_tables(tables, lengths, num_blocks, block_size)
        self.num_seqs = len(lengths)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.width_blocks = int(-(-lengths.max(initial=0) // block_size))
        # Blocks after a sequence's end become the null block, which holds zeros.
        columns = np.arange(self.width_blocks)
        live = np.where(columns * block_size < lengths[:, None], tables[:, : self.width_blocks], 0)
        # A layer viewed as (num_blocks * 2) half blocks: block b's keys are half 2b, its values half 2b + 1.
        halves = np.concatenate([live.reshape(-1) * 2, live.reshape(-1) * 2 + 1])
        self.halves = torch.from_numpy(halves).to(device)
        stale = _stale_positions(lengths, self.width_tokens, block_size)
        # The same positions in the keys, then in the values, of the gathered buffer.
        both = np.concatenate([stale, stale + self.num_seqs * self.width_tokens])
        self.stale_rows = torch.from_numpy(both).to(device)

    @property
    def width_tokens(self) -> int:
        """Return the length of the longest row in tokens, rounded up to whole blocks."""
        return self.width_blocks * self.block_size


def _require_tables(tables: IntArray, lengths: IntArray, num_blocks: int, block_size: int) -> None:
    if len(tables) != len(lengths):
        raise InvalidArgument(f"seq_lens has {len(lengths)} entries; block_tables has {len(tables)} rows")
    require_range("block_tables", tables, 0, num_blocks - 1)
    require_range("seq_lens", lengths, 1, tables.shape[1] * block_size)


def _stale_positions(lengths: IntArray, width_tokens: int, block_size: int) -> IntArray:
    """Return the positions (row * width + token) from each sequence's end to the end of its last block."""
    offsets = np.arange(block_size)
    used = (lengths - 1) % block_size + 1
    last_block = np.arange(len(lengths)) * width_tokens + lengths - used
    positions = last_block[:, None] + offsets
    return positions[offsets >= used[:, None]]
