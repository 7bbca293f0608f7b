"""Blocks and states go out here: they are copied to host buffers, from which tiers take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import Blocks, IsDone
from .snapshot import Snapshot
from .tier import Job
from .uses import TierUse, remember

#: Bytes of a job: several run side by side, and one that fails takes no more with it.
JOB_BYTES = 2**24
#: An object in buffers: its name, the digest of its tokens, its bytes, and the rows that they are in.
Filled = tuple[bytes, bytes, Any, list[int]]


class Stores:
    """It gives tiers objects in buffers of an offload; one is free again when no copy and no job reads it.

    blocks: the storage, with the buffers. rows: the buffers that stores have. numbers: of jobs, which loads count too.
    copies: what the device is still to copy, and what follows; the offload calls that.
    """

    def __init__(
        self, blocks: Blocks, rows: list[int], numbers: Iterator[int], copies: list[tuple[IsDone, Callable[[], None]]]
    ) -> None:
        self.free = rows
        #: Objects of a block in one job.
        self.job_objects = max(JOB_BYTES // blocks.object_bytes, 1)
        #: Jobs that tiers have: the names of their objects, and the rows.
        self.jobs: dict[int, tuple[TierUse, list[bytes], list[int]]] = {}
        #: Names that a tier which writes back did not take.
        self.refused: list[bytes] = []
        self._blocks = blocks
        self._numbers = numbers
        self._copies = copies
        #: How many copies and jobs read each row.
        self._readers = [0] * blocks.num_rows

    def names(self) -> Iterator[bytes]:
        """Yield the names of what is on its way."""
        for _, names, _ in self.jobs.values():
            yield from names

    def rows(self) -> list[int]:
        """Return the rows that are free or read. O(rows)."""
        return [*self.free, *np.flatnonzero(self._readers).tolist()]

    def take(self, num_rows: int) -> list[int]:
        """Take free rows, of which there must be as many, for `give`."""
        return [self.free.pop() for _ in range(num_rows)]

    def copy_out(
        self,
        ids: npt.NDArray[np.int32],
        objects: Sequence[tuple[int, bytes, bytes]],
        wanted: dict[TierUse, set[int]],
        layout: bytes,
        taken_by: tuple[Snapshot, int] | None = None,
    ) -> None:
        """Copy blocks to rows and give each to the tiers that want it by its number, the first item of its object.

        ids: (objects, groups). taken_by: the snapshot that they are for, and their place in it. O(bytes).
        """
        rows = self.take(len(objects))
        is_copied = self._blocks.read(ids, rows)
        filled = [
            (at, (name, tokens, self._blocks.buffer(row), [row]))
            for (at, name, tokens), row in zip(objects, rows, strict=True)
        ]
        parts = [(use, [each for at, each in filled if at in chosen]) for use, chosen in wanted.items()]
        self.give(rows, is_copied, parts, layout, taken_by)

    def give(
        self,
        rows: list[int],
        is_copied: IsDone | None,
        parts: list[tuple[TierUse, list[Filled]]],
        layout: bytes,
        taken_by: tuple[Snapshot, int] | None = None,
    ) -> None:
        """Give each tier its part of the objects in rows that were just taken, once they are copied."""
        self._hold(rows)

        def submit() -> None:
            for use, some in parts:
                self._submit(use, layout, some, taken_by)
            self._release(rows)

        if is_copied is None:
            submit()
        else:
            self._copies.append((is_copied, submit))

    def _submit(
        self,
        use: TierUse,
        layout: bytes,
        objects: list[Filled],
        taken_by: tuple[Snapshot, int] | None = None,
    ) -> None:
        for first in range(0, len(objects), self.job_objects):
            part = objects[first : first + self.job_objects]
            names, rows = [each[0] for each in part], [row for each in part for row in each[3]]
            job = Job(next(self._numbers), layout, names, [each[1] for each in part], [each[2] for each in part])
            if use.tier.store(job) is not None:
                if taken_by is not None:
                    taken_by[0].go_back(taken_by[1])
                else:
                    use.num_skipped += len(names)
                    if use.write == "back":
                        self.refused += names
                continue
            if taken_by is not None:
                taken_by[0].jobs.add(job.id)
            self.jobs[job.id] = (use, names, rows)
            self._hold(rows)
            remember(use.known, names)

    def _hold(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._readers[row] += 1

    def _release(self, rows: Iterable[int]) -> None:
        """A job, or the copy before it, reads these rows no more."""
        for row in rows:
            self._readers[row] -= 1
            if not self._readers[row]:
                self.free.append(row)

    def end(self, number: int) -> tuple[TierUse, list[bytes]] | None:
        """Forget a job, and return its tier and names; None for one that is not here. O(objects)."""
        if number not in self.jobs:
            return None
        use, names, rows = self.jobs.pop(number)
        self._release(rows)
        return use, names
