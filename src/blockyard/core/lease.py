"""What the pool hands out: blocks that are already counted as held."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from .arrays import view_i32


class BlockLease:
    """A counted hold on some blocks, in order. Given back once, to the pool that gave it (`free_blocks`).

    A lease is an object and not a list of ids because an id says nothing about who may free it: ids are reused, and
    a second free of the same id would hand one block to two owners. The pool knows each of its leases by serial,
    so a double, stale or foreign free is caught in O(1), whatever has happened to the blocks since.
    """

    def __init__(self, serial: int, holder: str, blocks: vec[i32], ledger: dict[int, "BlockLease"]) -> None:
        self.serial = serial
        self.holder = holder
        self.blocks = blocks
        #: The book of its pool, in which a live lease stands under its serial.
        self.ledger = ledger

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """The ids, int32 (n,), read-only, without a copy."""
        return view_i32(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> int:
        return int(self.blocks[i64(index)])

    def __iter__(self) -> Iterator[int]:
        return iter([int(block) for block in self.blocks])

    def __repr__(self) -> str:
        return f"<BlockLease {self.serial} of {self.holder!r}: blocks {list(self)}>"
