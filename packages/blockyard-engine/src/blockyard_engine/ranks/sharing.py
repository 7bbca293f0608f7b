"""Here each rank of a machine copies its part of what tiers keep to and from rows of memory that all map.

Rank 0 has the tiers and decides; an object is the ranks' parts of a block, one behind the other, so that it is there as
a whole or not at all. A copy is a short message among the plans, so that all ranks make it between the same steps, and
those that are asked say when it is made. The rows have no name in any folder (memfd): they go with the last process.

Needs the extra `tiers` beside `engine`.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from blockyard.sizing import Shard
from blockyard.storage import KVCache, StateSlots
from blockyard.wire import Message
from blockyard_tiers import IsDone
from blockyard_tiers.kv_blocks import KVBlocks, num_rows_in, object_bytes_of
from blockyard_tiers.state_objects import StateObjects

from ..shape import KVShape

#: Between two looks at a device that copies.
_PAUSE_SECONDS = 0.0005


class Ask(Protocol):
    """Asks the other ranks for a copy of blocks or a state, "read", "write" or "fill"."""

    def __call__(self, what: str, rows: Sequence[int], blocks: npt.NDArray[np.int32], slot: int = 0) -> IsDone:
        """Return what tells whether they have made it; it never does once a rank is lost. O(blocks * ranks)."""


class SharedRows:
    """These rows of bytes are mapped by several processes. On Linux alone.

    path: of another process's rows of this shape; None for new ones, of which `path` names the way for as long as
    `close_path` was not called.
    """

    def __init__(self, num_rows: int, row_bytes: int, is_cuda: bool, path: str | None = None) -> None:
        size = num_rows * row_bytes
        if path is None:
            self._descriptor = os.memfd_create("blockyard-tiers", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, size)
        else:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        #: uint8 (rows, bytes).
        self.tensor = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8).view(num_rows, row_bytes)
        if path is not None:
            self.close_path()
        if is_cuda:  # pinned, so that the device copies by itself
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size, 0))

    def close_path(self) -> None:
        """All have mapped the rows, so the path is needed no more."""
        os.close(self._descriptor)


class ObjectParts:
    """`firsts` says where each rank's part of a block begins in an object; ranks of the same heads have one part."""

    def __init__(self, kv_cache: KVCache, shape: KVShape, num_ranks: int) -> None:
        own = object_bytes_of(kv_cache)
        if shape.context is not None:
            self.firsts = [rank * own for rank in range(num_ranks)]
            #: Bytes of an object.
            self.num_bytes = num_ranks * own
            self._layout: dict[str, Any] = {"shards": num_ranks, "interleave": shape.context.interleave}
            return
        heads = [kv_cache.kv_heads] * num_ranks
        if shape.shard is not None:
            heads = [Shard(rank, num_ranks).kv_heads(shape.num_kv_heads) for rank in range(num_ranks)]
        begins: dict[range, int] = {}
        self.num_bytes = 0
        for each in heads:
            if each not in begins:
                begins[each] = self.num_bytes
                self.num_bytes += own // len(kv_cache.kv_heads) * len(each)
        self.firsts = [begins[each] for each in heads]
        self._layout = {"ranks": [[each.start, each.stop] for each in heads]}

    def layout(self) -> dict[str, Any]:
        """Return what an object's bytes mean, beside what rank 0's part means."""
        return self._layout


class RankBlocks:
    """On rank 0 these are `tiers.memory.Blocks` of all ranks. own: its part, in the same rows. ask: the others."""

    def __init__(self, own: KVBlocks, rows: torch.Tensor, parts: ObjectParts, ask: Ask) -> None:
        self.num_rows, self.object_bytes = rows.shape
        self._own, self._parts, self._ask = own, parts, ask
        self._bytes: npt.NDArray[np.uint8] = rows.numpy()

    def layout(self) -> dict[str, Any]:
        """Does as `KVBlocks`."""
        return {**self._own.layout(), **self._parts.layout()}

    def buffer(self, row: int) -> memoryview:
        """Return the bytes of a row, all ranks' parts."""
        return memoryview(self._bytes[row])

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone:
        """Does as `KVBlocks`, on all ranks."""
        others = self._ask("read", rows, block_ids)
        return _both(others, self._own.read(block_ids, rows))

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone:
        """Does as `KVBlocks`, on all ranks."""
        others = self._ask("write", rows, block_ids)
        return _both(others, self._own.write(block_ids, rows))


class RankStates:
    """On rank 0 these are `tiers.memory.States` of all ranks: each has every state, and rank 0 reads its own."""

    def __init__(self, own: StateObjects, ask: Ask) -> None:
        self.object_bytes, self.num_rows = own.object_bytes, own.num_rows
        self.layout, self.buffers, self.read = own.layout, own.buffers, own.read
        self._own, self._ask = own, ask

    def write(self, slot: int, rows: Sequence[int], kept: npt.NDArray[np.int32]) -> IsDone:
        """Does as `StateObjects`, on all ranks."""
        others = self._ask("fill", rows, kept, slot)
        return _both(others, self._own.write(slot, rows, kept))


class RankCopies:
    """This makes the copies of a rank other than 0, in the order in which they are asked for.

    given: what rank 0 says of the rows. say: tells rank 0 that the copy of this number is made.
    """

    def __init__(
        self,
        given: dict[str, Any],
        rank: int,
        kv_cache: KVCache,
        slots: StateSlots | None,
        say: Callable[[int], None],
    ) -> None:
        firsts = given["firsts"]
        is_cuda = kv_cache.device.type == "cuda"
        rows = SharedRows(given["num_rows"], given["row_bytes"], is_cuda, given["path"]).tensor
        self._blocks = part_of(kv_cache, rows, firsts[rank])
        self._states = None if slots is None else StateObjects(part_of(kv_cache, rows, 0), slots)
        #: Whether no rank before this one has the same part.
        self._is_first = firsts.index(firsts[rank]) == rank
        self._say = say
        #: Waits for the device, so that steps do not.
        self._waiting = ThreadPoolExecutor(1, "blockyard-tier-copies")

    def carry_out(self, message: Message) -> None:
        """Make a copy, and say so once it is made. O(bytes)."""
        what, (rows, ids) = message.fields["what"], message.arrays
        is_done = self._begin(what, rows.tolist(), ids.reshape(*message.fields["shape"]), message.fields["slot"])
        if is_done is None:
            self._say(message.number)
        else:
            self._waiting.submit(self._wait, is_done, message.number)

    def _begin(self, what: str, rows: list[int], ids: npt.NDArray[np.int32], slot: int) -> IsDone | None:
        if what == "fill":
            return None if self._states is None else self._states.write(slot, rows, ids)
        if what == "write":
            return self._blocks.write(ids, rows)
        return self._blocks.read(ids, rows) if self._is_first else None

    def _wait(self, is_done: IsDone, number: int) -> None:
        while not is_done():
            time.sleep(_PAUSE_SECONDS)
        self._say(number)


def new_rows(kv_cache: KVCache, parts: ObjectParts, buffer_bytes: int) -> SharedRows:
    """Return rows for objects of all ranks. Raises `InvalidArgument` for a budget of less than two objects."""
    is_cuda = kv_cache.device.type == "cuda"
    return SharedRows(num_rows_in(buffer_bytes, parts.num_bytes), parts.num_bytes, is_cuda)


def part_of(kv_cache: KVCache, rows: torch.Tensor, first: int) -> KVBlocks:
    """Return a rank's blocks, in its part of the rows, which begins at byte `first`."""
    return KVBlocks(kv_cache, host=rows[:, first : first + object_bytes_of(kv_cache)])


def _both(others: IsDone, own: IsDone | None) -> IsDone:
    return others if own is None else lambda: own() and others()
