"""A step as rank 0 sends it to the others: block moves, and what the model's forward needs, as one bytes object.

Its head has the number of the step and a digest of this message and all before it, so that a rank that missed or
changed one is found at that step.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import RankError
from ...storage import MoveLists
from ..attention.interface import GroupRows, StepShape
from ..runner import ForwardBatch

FORMAT = 1
_HEAD = struct.Struct("<BxxxxxxxQ16s")
_ARRAY = struct.Struct("<BBxxxxxxQQ")
_TYPES: tuple[type, ...] = (np.int32, np.int64)
_ARRAYS_A_MOVE = 3


class StepLog:
    """The steps so far, from one side: rank 0 adds what it sends, another rank what it receives.

    start: what all ranks agreed on.
    """

    def __init__(self, start: bytes) -> None:
        self._digest = hashlib.blake2b(start, digest_size=16).digest()
        self.num_steps = 0

    def to_bytes(self, moves: Sequence[MoveLists], batch: ForwardBatch | None) -> bytes:
        """The next step's message. batch: None where blocks move and nothing is computed. O(bytes)."""
        body = _packed(_arrays(moves, batch))
        self._add(body)
        return _HEAD.pack(FORMAT, self.num_steps, self._digest) + body

    def from_bytes(self, message: bytearray) -> tuple[list[MoveLists], ForwardBatch | None]:
        """What the next step's message says; the arrays are views of it. O(arrays), and a digest of its bytes.

        Raises `RankError` if it is not the message that follows those before.
        """
        form, number, digest = _HEAD.unpack_from(message)
        if form != FORMAT:
            raise RankError(f"a step of format {form} came; this rank reads format {FORMAT}")
        body = memoryview(message)[_HEAD.size :]
        self._add(body)
        if (number, digest) != (self.num_steps, self._digest):
            raise RankError(
                f"diverged at step {number}: the digest of all steps is {self._digest.hex()} after {self.num_steps} "
                f"steps here, {digest.hex()} on rank 0"
            )
        return _read(_unpacked(body))

    def _add(self, body: bytes | memoryview) -> None:
        self._digest = hashlib.blake2b(body, key=self._digest, digest_size=16).digest()
        self.num_steps += 1


def _arrays(moves: Sequence[MoveLists], batch: ForwardBatch | None) -> list[NDArray[Any]]:
    groups = [] if batch is None else batch.shape.groups
    head = np.array([len(moves), len(groups), *(rows.sliding_window for rows in groups)], np.int64)
    arrays: list[NDArray[Any]] = [head]
    for each in moves:
        arrays += [np.asarray(pairs, np.int32).reshape(-1, 2) for pairs in (each.swap_outs, each.swap_ins, each.copies)]
    for rows in groups:
        arrays += [rows.slot_mapping, rows.block_tables]
    if batch is not None:
        arrays += [batch.shape.num_computed, batch.shape.num_scheduled, batch.token_ids]
    return arrays


def _read(arrays: list[NDArray[Any]]) -> tuple[list[MoveLists], ForwardBatch | None]:
    num_moves, num_groups, *windows = arrays[0].tolist()
    end = 1 + _ARRAYS_A_MOVE * num_moves
    moves = [MoveLists(*arrays[place : place + _ARRAYS_A_MOVE]) for place in range(1, end, _ARRAYS_A_MOVE)]
    if not num_groups:
        return moves, None
    pairs = arrays[end : end + 2 * num_groups]
    rows = [
        GroupRows(slots, tables, window) for slots, tables, window in zip(pairs[::2], pairs[1::2], windows, strict=True)
    ]
    num_computed, num_scheduled, token_ids = arrays[end + 2 * num_groups :]
    # No rank but 0 needs logits.
    return moves, ForwardBatch(StepShape(num_computed, num_scheduled, rows), token_ids, np.empty(0, np.int64))


def _packed(arrays: list[NDArray[Any]]) -> bytes:
    parts = [struct.pack("<Q", len(arrays))]
    for array in arrays:
        rows, columns = (len(array), 1) if array.ndim == 1 else array.shape
        parts.append(_ARRAY.pack(_TYPES.index(array.dtype.type), array.ndim, rows, columns))
        parts.append(np.ascontiguousarray(array).tobytes())
        parts.append(bytes(-array.nbytes % 8))
    return b"".join(parts)


def _unpacked(body: memoryview) -> list[NDArray[Any]]:
    arrays: list[NDArray[Any]] = []
    (count,) = struct.unpack_from("<Q", body)
    place = 8
    for _ in range(count):
        kind, num_dims, rows, columns = _ARRAY.unpack_from(body, place)
        place += _ARRAY.size
        array = np.frombuffer(body, _TYPES[kind], rows * columns, place)
        place += array.nbytes + -array.nbytes % 8
        arrays.append(array if num_dims == 1 else array.reshape(rows, columns))
    return arrays
