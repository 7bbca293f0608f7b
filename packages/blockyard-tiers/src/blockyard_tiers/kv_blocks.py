"""Objects made of a KV cache's blocks, which are copied to and from rows of host memory that tiers read and write.

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

#: Largest number of rows: small objects need no more.
_MAX_ROWS = 2**16
#: Returns whether a copy is done.
IsDone = Callable[[], bool]


def object_bytes_of(kv_cache: KVCache) -> int:
    """Return the bytes of an object: a block of each group, of the layers that the group has. O(1)."""
    return kv_cache.bytes_per_block // kv_cache.places.num_places * kv_cache.num_layers


def num_rows_in(buffer_bytes: int, object_bytes: int) -> int:
    """Return how many objects fit into the buffers. Raises `InvalidArgument` if fewer than two do."""
    if buffer_bytes < 2 * object_bytes:
        raise InvalidArgument(f"buffer_bytes is {buffer_bytes}; it must hold two objects of {object_bytes} bytes")
    return min(buffer_bytes // object_bytes, _MAX_ROWS)


class KVBlocks:
    """Objects of a `KVCache`, each one logical block of all layer groups, over all layers of this process.

    An object is the concatenation, over all groups and their layers, of the layer's part of the group's block in
    `KVCache.data`. Parts of a block that a smaller group does not use are left out: they hold data of other groups.

    Args:
        kv_cache: on a CPU or CUDA; all of its groups have one block size.
        buffer_bytes: host memory for objects in transfer, pinned for CUDA tensors. On a CPU the system allocates a
            row's memory when the row is first written.
        host: existing memory to use instead, uint8 (rows, bytes of an object), each row contiguous.

    Raises:
        InvalidArgument: the buffers hold fewer than two objects.
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
        #: For each group: its number of layer places, and its part of the rows, (rows, places, words).
        self._parts = []
        first = 0
        for size in sizes:
            self._parts.append((size, words[:, first : first + size * width].unflatten(1, (size, width))))
            first += size * width

    def layout(self) -> dict[str, Any]:
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
        return memoryview(self._bytes[row])

    def host(self, row: int) -> torch.Tensor:
        """Return the bytes of a row as a tensor."""
        return self._host[row]

    def read(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
        """Copy the blocks, (n, groups), into rows, after all earlier work of the device. O(bytes).

        Return None if done, else a function that reports when it is.
        """
        self.kv_cache.finish_moves()
        for blocks, data, host in self._of_groups(block_ids):
            if self._is_cuda:
                ids = torch.from_numpy(blocks).to(data.device)
                for row, found in zip(rows, data.index_select(1, ids).transpose(0, 1).contiguous(), strict=True):
                    host[row].copy_(found, non_blocking=True)
            else:  # torch's threads would synchronise for longer than a block takes
                source, target = data.numpy(), host.numpy()
                for row, block in zip(rows, blocks.tolist(), strict=True):
                    target[row] = source[:, block]
        return self.mark()

    def write(self, block_ids: npt.NDArray[np.int32], rows: Sequence[int]) -> IsDone | None:
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
        """Yield for each group the block ids, the groups' data, and its part of the rows."""
        for group, (size, host) in enumerate(self._parts):
            yield block_ids[:, group].astype(np.int64), self._data[:size], host

    def mark(self) -> IsDone | None:
        """Return a function that reports when the device has finished all work so far; None on a CPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._data.device))
        is_done: IsDone = event.query
        return is_done
