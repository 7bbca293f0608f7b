"""Interfaces of an engine's memory to an offload: its KV blocks, its states, and rows of host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: Returns whether a copy is done.
IsDone = Callable[[], bool]


class Blocks(Protocol):
    """KV storage with rows of host memory as transfer buffers. `KVBlocks` implements it for a `KVCache`.

    Attributes:
        object_bytes: bytes of an object, one block of all layer groups.
        num_rows: number of rows; each holds an object.
    """

    object_bytes: int
    num_rows: int

    def layout(self) -> Mapping[str, Any]:
        """Return everything but the model that determines the meaning of an object's bytes, as plain values.

        "shards" is the number of context shards in an object; the default is 1.
        """

    def buffer(self, row: int) -> memoryview:
        """Return a row as a buffer of `object_bytes` bytes."""

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the blocks, (n, groups), into rows. Return None if done, else a function that reports when it is."""

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the rows into blocks, before all later work of the device. Returns as `read` does."""


class States(Protocol):
    """States of a hybrid model. `StateObjects` implements it for `blockyard.storage`.

    Attributes:
        object_bytes: bytes of a state's object.
        num_rows: rows of `Blocks` that a state takes.
    """

    object_bytes: int
    num_rows: int

    def layout(self) -> list[Any]:
        """Return everything but the model that determines the meaning of a state's bytes, as plain values."""

    def buffers(self, rows: Sequence[int]) -> list[memoryview]:
        """Return the bytes of an object in these rows, as a list of buffers."""

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy a cached state from its blocks into rows. Returns as `Blocks.read` does."""

    def write(self, slot: int, rows: Sequence[int], checkpoints: npt.NDArray[np.int32]) -> IsDone | None:
        """Copy a state from rows to a slot, and to the blocks of its checkpoint, (0 or 1, blocks of a state)."""
