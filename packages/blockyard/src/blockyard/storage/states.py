"""States of running sequences in slots, copied to and from blocks of the pool as checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ..arguments import require_int
from ..config import MAX_SEQS
from ..errors import InvalidArgument
from .kv_cache import KVCache

#: Slots begin at multiples of this many bytes, which aligns every dtype.
_ALIGNMENT = 16


class SlotMoves(Protocol):
    """Slot operations of a plan before its step (`StepPlan.states`)."""

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Return slots to copy, as (from, to)."""

    @property
    def clears(self) -> npt.NDArray[np.int32]:
        """Return the slots to clear."""

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Return the slots to load a checkpoint into."""

    @property
    def load_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks to load each slot from."""


@dataclass(frozen=True, slots=True)
class SlotLists:
    """A copy of a plan's slot operations that is still valid when the next plan is made."""

    copies: npt.NDArray[np.int32]
    clears: npt.NDArray[np.int32]
    loads: npt.NDArray[np.int32]
    load_blocks: npt.NDArray[np.int32]

    @classmethod
    def of(cls, moves: SlotMoves) -> SlotLists:
        """Return the lists of `StepPlan.states`."""
        return cls(moves.copies, moves.clears, moves.loads, moves.load_blocks)

    @property
    def has_any(self) -> bool:
        """Return whether any list is not empty."""
        return len(self.copies) + len(self.clears) + len(self.loads) > 0


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Shape and dtype of one tensor of a sequence's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return its bytes."""
        size: int = self.dtype.itemsize
        return math.prod(self.shape) * size


class StateSlots:
    """States of running sequences, one row of bytes each, and their copies to and from blocks of a `KVCache`.

    A state is the concatenation of its tensors, those of the widest dtype first. A checkpoint is the same bytes, cut
    into blocks of the pool. So saving or loading a state is one copy, and a block holds either keys and values or a
    part of a state (docs/states.md).

    Args:
        num_slots: rows of the manager, the most sequences at once.
        tensors: tensors of one sequence's state.
        kv_cache: cache with the pool's blocks.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    def __init__(self, num_slots: int, tensors: Sequence[StateTensor], kv_cache: KVCache) -> None:
        self.num_slots = require_int("num_slots", num_slots, 1, MAX_SEQS)
        self.tensors = tuple(tensors)
        if not self.tensors:
            raise InvalidArgument("tensors is empty; it must have at least one tensor")
        self._kv_cache = kv_cache
        #: The pool as bytes, (positions, blocks, bytes of a block at a position).
        self._pool = kv_cache.data.flatten(2).view(torch.uint8)
        self._num_parts = -(-self.num_bytes // kv_cache.bytes_per_block)
        self._part_shape = (self._num_parts, len(self._pool), self._pool.shape[2])
        self._part_bytes = math.prod(self._part_shape)
        width = -(-self._part_bytes // _ALIGNMENT) * _ALIGNMENT
        self._rows = torch.zeros((self.num_slots, width), dtype=torch.uint8, device=kv_cache.device)
        self._offsets = _offsets(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of one state, a `LayerGroup`'s state_bytes."""
        return state_bytes(self.tensors)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all slots."""
        return int(self._rows.numel())

    def describe(self) -> tuple[str, ...]:
        """Return the dtype and shape of each tensor, in order, to compare both sides of a hand-over. O(n)."""
        return tuple(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in self.tensors)

    def rows(self, slots: npt.NDArray[np.int64]) -> tuple[torch.Tensor, bool]:
        """Return the rows of some slots, uint8 (n, bytes), and whether they are a copy.

        Neighbouring slots give a view. Write a copy back with `put_back`.
        """
        first, number = int(slots[0]), len(slots)
        if bool((np.diff(slots) == 1).all()):
            return self._rows[first : first + number], False
        return self._rows[torch.from_numpy(slots).to(self._rows.device)], True

    def put_back(self, slots: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Write back the copy that `rows` returned. O(bytes)."""
        self._rows[torch.from_numpy(slots).to(self._rows.device)] = rows

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in rows, (n, *shape) each, as views. O(tensors)."""
        return [
            rows[:, start : start + tensor.num_bytes].view(tensor.dtype).unflatten(1, tensor.shape)
            for start, tensor in zip(self._offsets, self.tensors, strict=True)
        ]

    def move(self, moves: SlotMoves) -> None:
        """Carry out a plan's slot operations before its step: copies in order, then clears, then loads. O(bytes moved).

        Call it after the plan's moves of blocks. Raises `InvalidArgument` for an invalid slot or block; earlier
        operations are done by then.
        """
        for source, target in moves.copies.tolist():
            self._row(target).copy_(self._row(source))
        for slot in moves.clears.tolist():
            self._row(slot).zero_()
        self._kv_cache.finish_moves()
        for slot, blocks in _pairs(moves.loads, moves.load_blocks):
            # From (positions, blocks of the state, bytes) to the order of the state's bytes.
            self._parts(slot).copy_(self._pool[:, self._ids(blocks)].transpose(0, 1))

    def fill(self, slot: int, parts: Sequence[torch.Tensor]) -> None:
        """Write an external state, given in blocks of bytes, into a slot. O(bytes)."""
        for target, part in zip(self._parts(slot), parts, strict=True):
            target.copy_(part, non_blocking=True)

    def save(self, slots: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> None:
        """Save the states of slots after a step. O(bytes).

        Raises `InvalidArgument` for an invalid slot or block; earlier states are saved by then.

        Args:
            slots: `saves` of the plan, (n,).
            blocks: `save_blocks` of the plan, (n, blocks per state).
        """
        self._kv_cache.finish_moves()
        for slot, ids in _pairs(slots, blocks):
            self._pool[:, self._ids(ids)] = self._parts(slot).transpose(0, 1)

    def state(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot's state, uint8 (num_bytes,), as a view.

        Raises `InvalidArgument` for an invalid slot.
        """
        return self._row(slot)[: self.num_bytes]

    def saved_state(self, blocks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return a copy of a saved state's bytes, uint8 (num_bytes,). O(bytes).

        Raises `InvalidArgument` for invalid blocks.
        """
        self._kv_cache.finish_moves()
        return self._pool[:, self._ids(blocks.tolist())].transpose(0, 1).flatten()[: self.num_bytes]

    def _row(self, slot: int) -> torch.Tensor:
        return self._rows[require_int("slot", slot, 0, self.num_slots - 1)]

    def _parts(self, slot: int) -> torch.Tensor:
        """Return a slot's bytes as blocks, (blocks of a state, positions, bytes)."""
        return self._row(slot)[: self._part_bytes].view(self._part_shape)

    def _ids(self, blocks: list[int]) -> torch.Tensor:
        if len(blocks) != self._num_parts or not all(0 < block < self._kv_cache.num_blocks for block in blocks):
            raise InvalidArgument(
                f"blocks of a state are {blocks}; they must be {self._num_parts} ids from 1 to "
                f"{self._kv_cache.num_blocks - 1}"
            )
        return torch.tensor(blocks, device=self._pool.device)


def state_bytes(tensors: Iterable[StateTensor]) -> int:
    """Return the bytes of a state of these tensors, without padding."""
    return sum(tensor.num_bytes for tensor in tensors)


def _pairs(slots: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> Iterable[tuple[int, list[int]]]:
    return zip(slots.tolist(), blocks.tolist(), strict=True)


def _offsets(tensors: Sequence[StateTensor]) -> list[int]:
    """Return where each tensor begins in a state. The widest dtypes come first, so that each is aligned."""
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].dtype.itemsize)
    offsets, start = [0] * len(tensors), 0
    for place in order:
        offsets[place] = start
        start += tensors[place].num_bytes
    return offsets
