"""Host buffers for stores: blocks and states are copied into them, and tiers store from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .context import PendingCopy
from .engine_memory import Blocks, IsDone
from .snapshot import NamedBlock, Snapshot
from .tier import Transfer
from .transfers import OffloadTransfer, may_be_queued
from .uses import TierUse, remember

#: Bytes of a transfer: several run side by side, and one that fails takes no others with it.
TRANSFER_BYTES = 2**24


class BufferedObject(NamedTuple):
    """An object in buffers: its name, the digest of its tokens, its bytes, and the rows that hold them."""

    name: bytes
    digest: bytes
    buffer: Any
    rows: list[int]


class StoreBuffers:
    """Copies objects into buffer rows and stores them in tiers. A row is free when no copy and no transfer uses it.

    Args:
        blocks: the KV storage with the buffers.
        rows: the buffers for stores.
        numbers: ids for transfers, shared with loads.
        copies: unfinished copies of the device.
    """

    def __init__(self, blocks: Blocks, rows: list[int], numbers: Iterator[int], copies: list[PendingCopy]) -> None:
        self.free = rows
        self._all_rows = tuple(rows)
        #: Block objects per transfer.
        self.transfer_objects = max(TRANSFER_BYTES // blocks.object_bytes, 1)
        #: Transfers under way, by id.
        self.transfers: dict[int, OffloadTransfer] = {}
        #: Names that a tier with write="back" refused.
        self.refused_names: list[bytes] = []
        self._blocks = blocks
        self._numbers = numbers
        self._copies = copies
        #: Copies and transfers that use each row.
        self._num_users = [0] * blocks.num_rows

    def names(self) -> Iterator[bytes]:
        """Yield the names of the objects that are being stored."""
        for transfer in self.transfers.values():
            yield from transfer.names

    def rows(self) -> list[int]:
        """Return the rows that are free or in use. O(rows)."""
        return [*self.free, *np.flatnonzero(self._num_users).tolist()]

    def take(self, num_rows: int) -> list[int]:
        """Take `num_rows` free rows, for `submit`; the caller has checked that there are as many."""
        return [self.free.pop() for _ in range(num_rows)]

    def copy_out(
        self,
        ids: npt.NDArray[np.int32],
        objects: Sequence[NamedBlock],
        wanted: dict[TierUse, set[int]],
        layout: bytes,
        source: tuple[Snapshot, int] | None = None,
    ) -> None:
        """Copy blocks to rows, and store each in the tiers that want it. O(bytes).

        Args:
            ids: block ids, (objects, groups).
            objects: the blocks, each with its name and digest.
            wanted: by tier, `NamedBlock.block` of the objects to store there.
            layout: id of the layout.
            source: the snapshot that they are stored for, and their position in it.
        """
        rows = self.take(len(objects))
        is_copied = self._blocks.read(ids, rows)
        buffered = [
            (each.block, BufferedObject(each.name, each.digest, self._blocks.buffer(row), [row]))
            for each, row in zip(objects, rows, strict=True)
        ]
        parts = [(use, [each for block, each in buffered if block in chosen]) for use, chosen in wanted.items()]
        self.submit(rows, is_copied, parts, layout, source)

    def submit(
        self,
        rows: list[int],
        is_copied: IsDone | None,
        parts: list[tuple[TierUse, list[BufferedObject]]],
        layout: bytes,
        source: tuple[Snapshot, int] | None = None,
    ) -> None:
        """Give each tier its part of the objects in rows that were just taken, once they are copied."""
        self._hold(rows)

        def submit_parts() -> None:
            try:
                for use, objects in parts:
                    for first in range(0, len(objects), self.transfer_objects):
                        self._submit_one(use, layout, objects[first : first + self.transfer_objects], source)
            finally:  # also if a tier raises
                self._release(rows)

        if is_copied is None:
            submit_parts()
        else:
            self._copies.append(PendingCopy(is_copied, rows, submit_parts))

    def _submit_one(
        self, use: TierUse, layout: bytes, objects: list[BufferedObject], source: tuple[Snapshot, int] | None
    ) -> None:
        number, names = next(self._numbers), [each.name for each in objects]
        transfer = Transfer(number, layout, names, [each.digest for each in objects], [each.buffer for each in objects])
        rows = [row for each in objects for row in each.rows]
        self.transfers[number] = OffloadTransfer(use, names, rows)
        self._hold(rows)
        is_queued = False
        try:
            is_queued = use.tier.store(transfer) is None
        except BaseException as error:
            is_queued = may_be_queued(error)  # then the tier reads the rows
            raise
        finally:
            if not is_queued:
                self.end(number)
        if is_queued:
            if source is not None:
                source[0].transfer_ids.add(number)
            remember(use.present, names)
        elif source is not None:
            source[0].go_back(source[1])
        else:
            use.num_skipped += len(names)
            if use.write == "back":
                self.refused_names += names

    def _hold(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._num_users[row] += 1

    def _release(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._num_users[row] -= 1
            if not self._num_users[row]:
                self.free.append(row)

    def mend(self) -> None:
        """Count the users of each row again, after a call that was interrupted. O(rows)."""
        for row in self._all_rows:
            self._num_users[row] = 0
        in_use = [*(each.rows for each in self.transfers.values()), *(each.rows for each in self._copies)]
        for row in (row for rows in in_use for row in rows if row in self._all_rows):
            self._num_users[row] += 1
        self.free[:] = [row for row in self._all_rows if not self._num_users[row]]

    def end(self, number: int) -> OffloadTransfer | None:
        """Remove and return a transfer that has ended; None if it is not a store. O(objects)."""
        transfer = self.transfers.pop(number, None)
        if transfer is not None:
            self._release(transfer.rows)
        return transfer
