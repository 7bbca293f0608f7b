"""A running sequence of a hybrid model has its state in a slot; kept states are copies of it in blocks of the pool."""

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

#: Slots begin at multiples of this many bytes, so that every dtype may be read there.
_ALIGNMENT = 16


class SlotMoves(Protocol):
    """A plan says so what it does with slots before its step: `StepPlan.states`."""

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Return slots to copy, as (from, to)."""

    @property
    def clears(self) -> npt.NDArray[np.int32]:
        """Slots that begin with nothing."""

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Slots that a kept state goes to."""

    @property
    def load_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks that each is read from."""


@dataclass(frozen=True, slots=True)
class SlotLists:
    """Keeps what `StateSlots.move` takes of a plan, beyond the next one."""

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
        """Return whether there is anything to do."""
        return len(self.copies) + len(self.clears) + len(self.loads) > 0


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a sequence's state has this shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return its bytes."""
        size: int = self.dtype.itemsize
        return math.prod(self.shape) * size


class StateSlots:
    """Holds the states of running sequences, a row of bytes each, and copies them to and from blocks of a `KVCache`.

    A state is all of its tensors, one behind the other, those of the widest dtype first. A kept state is the same
    bytes, cut into blocks of the pool: so a state is loaded and saved by one copy, whatever layers it is of, and a
    block holds keys and values or a part of a state, as the manager says (docs/states.md).

    num_slots: rows of the manager, that is sequences that run at once. tensors: of one sequence's state.
    Memory begins as zeros. Raises `InvalidArgument` for values outside their limits.
    """

    def __init__(self, num_slots: int, tensors: Sequence[StateTensor], kv_cache: KVCache) -> None:
        self.num_slots = require_int("num_slots", num_slots, 1, MAX_SEQS)
        self.tensors = tuple(tensors)
        if not self.tensors:
            raise InvalidArgument("tensors is empty; a state has at least one")
        self._kv_cache = kv_cache
        #: The pool as bytes, (places, blocks, bytes of a block in a place).
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
        """Return each tensor of a state in words, in order, which both sides of a hand-over must have alike. O(n)."""
        return tuple(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in self.tensors)

    def rows(self, slots: npt.NDArray[np.int64]) -> tuple[torch.Tensor, bool]:
        """Return the rows of some slots, in order, uint8 (n, bytes), and whether these are copies (`put_back`).

        Neighbouring slots are a view.
        """
        first, number = int(slots[0]), len(slots)
        if bool((np.diff(slots) == 1).all()):
            return self._rows[first : first + number], False
        return self._rows[torch.from_numpy(slots).to(self._rows.device)], True

    def put_back(self, slots: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Write rows that `rows` copied. O(bytes)."""
        self._rows[torch.from_numpy(slots).to(self._rows.device)] = rows

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors in rows, (n, *shape) each, as views of them. O(tensors)."""
        return [
            rows[:, start : start + tensor.num_bytes].view(tensor.dtype).unflatten(1, tensor.shape)
            for start, tensor in zip(self._offsets, self.tensors, strict=True)
        ]

    def move(self, moves: SlotMoves) -> None:
        """Do all that a plan says of slots before its step: copies, in their order, then clears, then loads.

        It comes behind the plan's moves of blocks. O(bytes moved). Raises `InvalidArgument` for a slot or a block that
        there is not; what comes before it is done then.
        """
        for source, target in moves.copies.tolist():
            self._row(target).copy_(self._row(source))
        for slot in moves.clears.tolist():
            self._row(slot).zero_()
        self._kv_cache.finish_moves()
        for slot, blocks in _pairs(moves.loads, moves.load_blocks):
            # From (places, parts, bytes) to the order of the state's bytes.
            self._parts(slot).copy_(self._pool[:, self._ids(blocks)].transpose(0, 1))

    def fill(self, slot: int, parts: Sequence[torch.Tensor]) -> None:
        """Write a state that comes from outside into a slot: as many blocks of bytes as it takes. O(bytes)."""
        for target, part in zip(self._parts(slot), parts, strict=True):
            target.copy_(part, non_blocking=True)

    def save(self, slots: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> None:
        """Copy the states of slots after a step: `saves` and `save_blocks` of the plan, (n,) and (n, parts). O(bytes).

        Raises `InvalidArgument` for a slot or a block that there is not; those before it are saved then.
        """
        self._kv_cache.finish_moves()
        for slot, ids in _pairs(slots, blocks):
            self._pool[:, self._ids(ids)] = self._parts(slot).transpose(0, 1)

    def state(self, slot: int) -> torch.Tensor:
        """Return the bytes of a slot's state, uint8 (num_bytes,), a view. Raises `InvalidArgument` for no slot."""
        return self._row(slot)[: self.num_bytes]

    def kept(self, blocks: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return a copy of a kept state's bytes, uint8 (num_bytes,). O(bytes). Raises as `save`."""
        self._kv_cache.finish_moves()
        return self._pool[:, self._ids(blocks.tolist())].transpose(0, 1).flatten()[: self.num_bytes]

    def _row(self, slot: int) -> torch.Tensor:
        return self._rows[require_int("slot", slot, 0, self.num_slots - 1)]

    def _parts(self, slot: int) -> torch.Tensor:
        """Return a slot's bytes as the blocks that they are kept in, (parts, places, bytes)."""
        return self._row(slot)[: self._part_bytes].view(self._part_shape)

    def _ids(self, blocks: list[int]) -> torch.Tensor:
        if len(blocks) != self._num_parts or not all(0 < block < self._kv_cache.num_blocks for block in blocks):
            raise InvalidArgument(
                f"blocks of a state are {blocks}; they must be {self._num_parts} from 1 to "
                f"{self._kv_cache.num_blocks - 1}"
            )
        return torch.tensor(blocks, device=self._pool.device)


def state_bytes(tensors: Iterable[StateTensor]) -> int:
    """Return the bytes of a state of these tensors; there is nothing between them."""
    return sum(tensor.num_bytes for tensor in tensors)


def _pairs(slots: npt.NDArray[np.int32], blocks: npt.NDArray[np.int32]) -> Iterable[tuple[int, list[int]]]:
    return zip(slots.tolist(), blocks.tolist(), strict=True)


def _offsets(tensors: Sequence[StateTensor]) -> list[int]:
    """Return where each begins in a state, those of the widest dtype first, so that each is aligned."""
    order = sorted(range(len(tensors)), key=lambda place: -tensors[place].dtype.itemsize)
    offsets, start = [0] * len(tensors), 0
    for place in order:
        offsets[place] = start
        start += tensors[place].num_bytes
    return offsets
