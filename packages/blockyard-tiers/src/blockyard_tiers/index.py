"""The objects that a tier knows to be present, their sizes, and their order of eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from blockyard.errors import InvariantError
from blockyard.named import NamedPool

from .tier import MAX_OBJECT_BYTES, NAME_BYTES

_FIRST_ROWS = 1024


class ObjectIndex:
    """Names and sizes of objects, within a budget of bytes and of objects. Not thread-safe.

    It is a `NamedPool` whose blocks are rows of objects, so every eviction policy works here: an object is an idle
    block, and the block that an allocation would take is the object to evict. O(1) per object, about 320 bytes each.
    """

    def __init__(self, max_bytes: int, max_objects: int, eviction_policy: str = "lru") -> None:
        self.max_bytes = max_bytes
        self.max_objects = max_objects
        self.num_bytes = 0
        self.num_evicted = 0
        self._policy = eviction_policy
        self._pool = NamedPool(_FIRST_ROWS, eviction_policy=eviction_policy)
        #: Rows without an object. The pool counts them as held, so that it evicts when asked for a block.
        self._spare = self._pool.new_ids(_FIRST_ROWS - 1)
        self._sizes: npt.NDArray[np.int64] = np.zeros(_FIRST_ROWS, np.int64)
        self._names: npt.NDArray[np.void] = np.zeros(_FIRST_ROWS, f"V{NAME_BYTES}")

    def make_empty(self) -> ObjectIndex:
        """Return an index without objects that has the same budget and policy, and continues the count of evictions."""
        index = ObjectIndex(self.max_bytes, self.max_objects, self._policy)
        index.num_evicted = self.num_evicted
        return index

    def __len__(self) -> int:
        return self._pool.num_cached_blocks

    def __contains__(self, name: bytes) -> bool:
        return self._pool.find_one(name) != 0

    def prefix(self, names: Sequence[bytes]) -> int:
        """Return how many of `names` are known, from the first on. O(names)."""
        return int(self._pool.find_prefix(names).shape[1])

    def add(self, names: Sequence[bytes], sizes: Sequence[int]) -> list[bytes]:
        """Add objects, the last one as the most recently used; return the names that the budget evicts. O(names).

        An object larger than the budget, or than any object may be, is evicted itself, and no others for it.
        """
        most = min(self.max_bytes, MAX_OBJECT_BYTES)
        new = {name: size for name, size in zip(names, sizes, strict=True) if size <= most and name not in self}
        oversized = [name for name, size in zip(names, sizes, strict=True) if size > most]
        self.num_evicted += len(oversized)
        if not new:
            return oversized
        self._have_rows(len(new))
        rows = [self._spare.pop() for _ in new]
        self._names[rows] = np.frombuffer(b"".join(new), self._names.dtype)
        self._sizes[rows] = list(new.values())
        self.num_bytes += sum(new.values())
        self._pool.name_blocks(rows, list(new))
        self._pool.free_ids(rows)
        return oversized + self.evict(0)

    def _have_rows(self, count: int) -> None:
        rows = len(self._sizes)
        if count > len(self._spare):
            more = max(rows, count - len(self._spare))
            self._pool.resize(rows + more)
            self._spare += self._pool.new_ids(more)
            self._sizes = np.concatenate([self._sizes, np.zeros(more, np.int64)])
            self._names = np.concatenate([self._names, np.zeros(more, self._names.dtype)])

    def evict(self, num_bytes: int) -> list[bytes]:
        """Make room for `num_bytes` within the budget; return the names of the evicted objects. O(objects evicted)."""
        evicted = []
        while len(self) and (self.num_bytes + num_bytes > self.max_bytes or len(self) > self.max_objects):
            (row,) = self._pool.new_ids(1)
            evicted.append(self._names[row].tobytes())
            self._release(row)
        self.num_evicted += len(evicted)
        return evicted

    def items(self) -> tuple[list[bytes], list[int]]:
        """Return the names and sizes of all objects, the most recently used last. O(objects)."""
        rows = self._pool.free_block_ids()
        return [name.tobytes() for name in self._names[rows]], self._sizes[rows].tolist()

    def use(self, names: Sequence[bytes]) -> None:
        """Note that objects were used, the last one most recently. O(names)."""
        rows = [row for row in map(self._pool.find_one, names) if row]
        self._pool.hold_ids(rows)
        self._pool.free_ids(rows)

    def forget(self, names: Sequence[bytes]) -> None:
        """Remove all of `names`, which are no longer present. O(names)."""
        for name in names:
            row = self._pool.find_one(name)
            if row:
                self._pool.hold_ids([row])
                self._pool.uncache([row])
                self._release(row)

    def _release(self, row: int) -> None:
        self.num_bytes -= int(self._sizes[row])
        self._sizes[row] = 0
        self._spare.append(row)

    def check(self) -> None:
        """Raise `InvariantError` if the pool, the number of spare rows or the sum of bytes is wrong. O(rows)."""
        self._pool.check()
        rows, spare = len(self._sizes), len(self._spare)
        if spare + len(self) != rows - 1:
            raise InvariantError(f"index: {spare} spare rows and {len(self)} objects; there are {rows - 1} rows")
        if int(self._sizes.sum()) != self.num_bytes:
            raise InvariantError(f"index: sizes add up to {int(self._sizes.sum())}, the count says {self.num_bytes}")
