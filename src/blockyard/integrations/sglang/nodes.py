"""What a match is to SGLang's scheduler: a handle that can be locked, where its own cache gives a node of a tree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ... import BlockLease, BlockPool, FoundBlocks, InvalidArgument


class Node:
    """A cached beginning, and the lease on it while it is locked.

    found: what a lookup found; None for nothing, and for what a request has just cached: this is locked from the
    beginning and cannot be locked again after it was unlocked. A node of a pool that has been reset belongs to the old
    pool still.
    """

    __slots__ = ("_found", "_has_ended", "_lease", "_locks", "pool")

    def __init__(self, pool: BlockPool, found: FoundBlocks | None, lease: BlockLease | None = None) -> None:
        self.pool = pool
        self._found = found
        self._lease = lease
        self._locks = 0 if lease is None else 1
        self._has_ended = False

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Its blocks from the beginning, int32 (n,)."""
        if self._lease is not None:
            return self._lease.block_ids
        return np.zeros(0, np.int32) if self._found is None else self._found.block_ids

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def lease(self) -> BlockLease:
        """Its lease. Raises `InvalidArgument` where it is not locked."""
        if self._lease is None:
            raise InvalidArgument("this node is not locked; its lock was released")
        return self._lease

    def lock(self) -> None:
        """Hold its blocks once more. The first lock counts as a hit. O(blocks).

        Raises `StaleBlocks` where one of them has been evicted since.
        """
        if self._lease is None:
            if self._has_ended:
                raise InvalidArgument("this node was unlocked by the request that cached it; match the prefix again")
            self._lease = self.pool.get_new_blocks(0) if self._found is None else self.pool.hold(self._found)
        self._locks += 1

    def unlock(self) -> None:
        """Give one lock back; the last frees the blocks. Raises `InvalidArgument` where there is none."""
        lease = self.lease
        self._locks -= 1
        if self._locks == 0:
            self._end()
            self.pool.free_blocks(lease)

    def take_lease(self) -> BlockLease:
        """One lock's hold on the blocks, which is the caller's now, and no lock any more."""
        lease = self.lease
        self._locks -= 1
        if self._locks > 0:
            return self.pool.touch(lease)
        self._end()
        return lease

    def _end(self) -> None:
        self._has_ended = self._found is None and len(self.block_ids) > 0
        self._lease = None
