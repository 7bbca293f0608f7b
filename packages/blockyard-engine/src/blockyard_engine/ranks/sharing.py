"""Objects of tiers on several ranks: each rank copies its part to and from rows of shared memory.

Rank 0 has the tiers and decides. An object is the concatenation of the ranks' parts of a block, so it is stored as a
whole or not at all. Copies are requested by short messages between the plans, so all ranks make them between the same
steps, and confirm them when they are done. The memory has no name in any folder (memfd) and ends with the last process.

Needs the extras `tiers` and `engine`.
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

#: Seconds between two polls of a device that copies.
_PAUSE_SECONDS = 0.0005


class RequestCopy(Protocol):
    """Requests a copy of blocks ("read", "write") or a state ("fill") from the other ranks."""

    def __call__(self, what: str, rows: Sequence[int], blocks: npt.NDArray[np.int32], slot: int = 0) -> IsDone:
        """Return a function that tells whether all copies are done; never True once a rank has ended."""


class SharedRows:
    """Rows of bytes that several processes map. Linux only.

    Attributes:
        path: path for other processes to map the rows, valid until `close_path`.
        tensor: uint8 (rows, bytes).
    """

    def __init__(self, num_rows: int, row_bytes: int, is_cuda: bool, path: str | None = None) -> None:
        size = num_rows * row_bytes
        if path is None:
            self._descriptor = os.memfd_create("blockyard-tiers", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, size)
        else:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.tensor = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8).view(num_rows, row_bytes)
        if path is not None:
            self.close_path()
        if is_cuda:  # pin it, so that the device copies asynchronously
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size, 0))

    def close_path(self) -> None:
        """Close the path, after all processes have mapped the rows."""
        os.close(self._descriptor)


class ObjectParts:
    """Layout of an object: the offset of each rank's part; ranks with the same heads share a part.

    Attributes:
        firsts: offset of each rank's part.
        num_bytes: bytes of an object.
    """

    def __init__(self, kv_cache: KVCache, shape: KVShape, num_ranks: int) -> None:
        own = object_bytes_of(kv_cache)
        if shape.context is not None:
            self.firsts = [rank * own for rank in range(num_ranks)]
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
        """Return the meaning of an object's bytes, besides that of rank 0's part."""
        return self._layout


class RankBlocks:
    """Blocks of all ranks for tiers (`engine_memory.Blocks`), on rank 0; `own` is rank 0's part, in the same rows."""

    def __init__(self, own: KVBlocks, rows: torch.Tensor, parts: ObjectParts, request_copy: RequestCopy) -> None:
        self.num_rows, self.object_bytes = rows.shape
        self._own, self._parts, self._request_copy = own, parts, request_copy
        self._bytes: npt.NDArray[np.uint8] = rows.numpy()

    def layout(self) -> dict[str, Any]:
        return {**self._own.layout(), **self._parts.layout()}

    def buffer(self, row: int) -> memoryview:
        return memoryview(self._bytes[row])

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone:
        others = self._request_copy("read", rows, block_ids)
        return _both(others, self._own.read(block_ids, rows))

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone:
        others = self._request_copy("write", rows, block_ids)
        return _both(others, self._own.write(block_ids, rows))


class RankStates:
    """States of all ranks for tiers (`engine_memory.States`), on rank 0.

    Each rank has every state; rank 0's is stored.
    """

    def __init__(self, own: StateObjects, request_copy: RequestCopy) -> None:
        self.object_bytes, self.num_rows = own.object_bytes, own.num_rows
        self.layout, self.buffers, self.read = own.layout, own.buffers, own.read
        self._own, self._request_copy = own, request_copy

    def write(self, slot: int, rows: Sequence[int], checkpoints: npt.NDArray[np.int32]) -> IsDone:
        others = self._request_copy("fill", rows, checkpoints, slot)
        return _both(others, self._own.write(slot, rows, checkpoints))


class RankCopies:
    """Makes the copies of a rank other than 0, in the order of the requests, and confirms each by its number."""

    def __init__(
        self,
        given: dict[str, Any],
        rank: int,
        kv_cache: KVCache,
        slots: StateSlots | None,
        confirm: Callable[[int], None],
    ) -> None:
        firsts = given["firsts"]
        is_cuda = kv_cache.device.type == "cuda"
        rows = SharedRows(given["num_rows"], given["row_bytes"], is_cuda, given["path"]).tensor
        self._blocks = part_of(kv_cache, rows, firsts[rank])
        self._states = None if slots is None else StateObjects(part_of(kv_cache, rows, 0), slots)
        #: Whether this is the first rank with its part.
        self._is_first = firsts.index(firsts[rank]) == rank
        self._confirm = confirm
        #: Thread that waits for the device, so that steps do not.
        self._waiting = ThreadPoolExecutor(1, "blockyard-tier-copies")

    def carry_out(self, message: Message) -> None:
        """Make a copy, and confirm it once it is done. O(bytes)."""
        what, (rows, ids) = message.fields["what"], message.arrays
        is_done = self._begin(what, rows.tolist(), ids.reshape(*message.fields["shape"]), message.fields["slot"])
        if is_done is None:
            self._confirm(message.number)
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
        self._confirm(number)


def new_rows(kv_cache: KVCache, parts: ObjectParts, buffer_bytes: int) -> SharedRows:
    """Return rows for objects of all ranks. Raises `InvalidArgument` for a budget of fewer than two objects."""
    is_cuda = kv_cache.device.type == "cuda"
    return SharedRows(num_rows_in(buffer_bytes, parts.num_bytes), parts.num_bytes, is_cuda)


def part_of(kv_cache: KVCache, rows: torch.Tensor, first: int) -> KVBlocks:
    """Return a rank's blocks, with its part of the rows, which starts at byte `first`."""
    return KVBlocks(kv_cache, host=rows[:, first : first + object_bytes_of(kv_cache)])


def _both(others: IsDone, own: IsDone | None) -> IsDone:
    return others if own is None else lambda: own() and others()
