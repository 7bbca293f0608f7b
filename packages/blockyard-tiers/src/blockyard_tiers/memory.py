"""An offload sees an engine's memory as this: its blocks, the states of a hybrid model, rows of host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: Tells whether a copy that was asked for is done.
IsDone = Callable[[], bool]


class Blocks(Protocol):
    """This is the KV storage as an offload sees it; `KVBlocks` is one over `blockyard.storage.KVCache`."""

    object_bytes: int
    num_rows: int

    def layout(self) -> Mapping[str, Any]:
        """Returns all that decides what an object's bytes mean, but for the model, as plain values.

        Under "shards" it says how many context shards an object has, 1 where it says nothing.
        """

    def buffer(self, row: int) -> memoryview:
        """Returns the bytes of a row, `object_bytes`."""

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the blocks, (n, groups), into rows; None where it is done, else what tells it."""

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the rows into blocks, before all that the device is asked from now on; as `read`."""


class States(Protocol):
    """These are the states of an engine as an offload sees them; `StateObjects` are over `blockyard.storage`.

    object_bytes: of a state. num_rows: of the buffers of `Blocks` that it takes.
    """

    object_bytes: int
    num_rows: int

    def layout(self) -> list[Any]:
        """Returns all that decides what a state's bytes mean, but for the model, as plain values."""

    def buffers(self, rows: Sequence[int]) -> list[memoryview]:
        """Returns the bytes of an object in these rows, in pieces."""

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy a kept state from its blocks into rows; as `Blocks.read`."""

    def write(self, slot: int, rows: Sequence[int], kept: npt.NDArray[np.int32]) -> IsDone | None:
        """Copy a state from rows to a slot, and from there to the blocks that keep it, (0 or 1, blocks of a state)."""
