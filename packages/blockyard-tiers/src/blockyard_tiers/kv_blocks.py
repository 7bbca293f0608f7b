"""This makes objects of a KV cache's blocks: they are copied to rows of host memory, which tiers read, and back.

Needs torch: `pip install 'blockyard[engine]'`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from blockyard.arguments import shown
from blockyard.errors import InvalidArgument
from blockyard.storage import KVCache

#: Objects on their way at most: small ones need no more.
_MOST_ROWS = 2**16
#: Tells whether a copy that was asked for is done.
IsDone = Callable[[], bool]


def object_bytes_of(kv_cache: KVCache) -> int:
    """Returns the bytes of an object: a block of each group, of those layers that it has. O(1)."""
    return kv_cache.bytes_per_block // kv_cache.places.num_places * kv_cache.num_layers


def num_rows_in(buffer_bytes: int, object_bytes: int) -> int:
    """Returns how many objects buffers hold. Raises `InvalidArgument` unless they hold two."""
    if buffer_bytes < 2 * object_bytes:
        raise InvalidArgument(f"buffer_bytes is {buffer_bytes}; it must hold two objects of {object_bytes} bytes")
    return min(buffer_bytes // object_bytes, _MOST_ROWS)


class KVBlocks:
    """These are objects of a `KVCache`: one logical block each, of all layer groups, over all layers of this process.

    kv_cache: on a CPU or CUDA; all of its groups have one block size. buffer_bytes: host memory for objects on their
    way, pinned beside CUDA tensors; on a CPU the system gives memory to a row when it is first written. host: that
    memory, where it is made already, uint8 (rows, bytes of an object), each row contiguous.

    An object is, group by group, that group's block of each of its layers as it lies in `KVCache.data`. Places that a
    small group does not use are left out: they hold what another group wrote. Raises `InvalidArgument` for a budget
    of less than two objects.
    """

    def __init__(self, kv_cache: KVCache, buffer_bytes: int = 2**31, host: torch.Tensor | None = None) -> None:
        if not isinstance(kv_cache, KVCache):
            raise InvalidArgument(f"kv_cache is {shown(kv_cache)}; it must be a KVCache")
        self.kv_cache = kv_cache
        #: Bytes of an object.
        self.object_bytes = object_bytes_of(kv_cache)
        self._is_cuda = kv_cache.device.type == "cuda"
        if host is None:
            shape = (num_rows_in(buffer_bytes, self.object_bytes), self.object_bytes)
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_cuda)
        #: Objects that the buffers hold.
        self.num_rows = len(host)
        places = kv_cache.places
        sizes = [0] * places.num_groups
        for layer in range(kv_cache.num_layers):
            sizes[places.group(layer)] += 1
        steps = (kv_cache.bytes_per_block // places.num_places, host.stride(0), host.storage_offset())
        word = torch.uint8 if any(step % 8 for step in steps) else torch.int64
        self._data = kv_cache.data.flatten(2).view(word)
        width = int(self._data.shape[2])
        self._host = host
        self._bytes: npt.NDArray[np.uint8] = host.numpy()
        words = host.view(word)
        #: Of each group: its blocks' places, and its part of the rows, (rows, places, words).
        self._parts = []
        first = 0
        for size in sizes:
            self._parts.append((size, words[:, first : first + size * width].unflatten(1, (size, width))))
            first += size * width

    def layout(self) -> dict[str, Any]:
        """Returns what decides the meaning of an object's bytes, but for the model, as plain values."""
        cache = self.kv_cache
        return {
            "dtype": str(cache.dtype).removeprefix("torch."),
            "block_size": cache.block_size,
            "layout": cache.layout.value,
            "heads": [cache.kv_heads.start, cache.kv_heads.stop],
            "head_size": cache.head_size,
            "value_size": cache.value_size,
            **({"index_size": cache.index_size} if cache.index_size else {}),
            "groups": [
                [layer for layer in range(cache.num_layers) if cache.places.group(layer) == group]
                for group in range(cache.places.num_groups)
            ],
        }

    def buffer(self, row: int) -> memoryview:
        """Returns the bytes of a row."""
        return memoryview(self._bytes[row])

    def host(self, row: int) -> torch.Tensor:
        """Returns the bytes of a row as a tensor."""
        return self._host[row]

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the blocks, (n, groups), into rows, once all that the device was asked before is done. O(bytes).

        Returns None where it is done, else what tells it.
        """
        self.kv_cache.finish_moves()
        for blocks, data, host in self._of_groups(block_ids):
            if self._is_cuda:
                ids = torch.from_numpy(blocks).to(data.device)
                for row, found in zip(rows, data.index_select(1, ids).transpose(0, 1).contiguous(), strict=True):
                    host[row].copy_(found, non_blocking=True)
            else:  # torch's threads would wait for one another longer than a block takes
                source, target = data.numpy(), host.numpy()
                for row, block in zip(rows, blocks.tolist(), strict=True):
                    target[row] = source[:, block]
        return self.mark()

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the rows into blocks, before all that the device is asked from now on; as `read`. O(bytes)."""
        self.kv_cache.finish_moves()
        for blocks, data, host in self._of_groups(block_ids):
            if self._is_cuda:
                found = torch.empty((len(rows), *host.shape[1:]), dtype=host.dtype, device=data.device)
                for row, block in zip(rows, found, strict=True):
                    block.copy_(host[row], non_blocking=True)
                data.index_copy_(1, torch.from_numpy(blocks).to(data.device), found.transpose(0, 1))
            else:
                source, target = host.numpy(), data.numpy()
                for row, number in zip(rows, blocks.tolist(), strict=True):
                    target[:, number] = source[row]
        return self.mark()

    def _of_groups(
        self, block_ids: npt.NDArray[np.int32]
    ) -> Iterator[tuple[npt.NDArray[np.int64], torch.Tensor, torch.Tensor]]:
        """Goes over the groups: ids of the blocks, where they lie, and their part of the rows."""
        for group, (size, host) in enumerate(self._parts):
            yield block_ids[:, group].astype(np.int64), self._data[:size], host

    def mark(self) -> IsDone | None:
        """Returns what tells whether the device has done what it was asked so far; None where it has."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._data.device))
        is_done: IsDone = event.query
        return is_done
