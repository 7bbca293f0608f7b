"""Least recently used."""

from mypy_extensions import i64

from ..base import EvictionPolicy
from ..parts.lists import BlockLists


class LRU(EvictionPolicy):
    """The block that became idle first goes first. O(1) an operation.

    The pool's own free queue has this very order, so a pool with `"lru"` asks no policy at all; this class is for
    what stands around a policy (`Retention`) and for comparison.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._idle = BlockLists(1, num_blocks)

    def insert(self, block: i64, key: i64, depth: i64) -> None:  # noqa: ARG002
        """`block` became idle: it goes last."""
        self._idle.append(0, block)

    def needs_hits(self) -> bool:
        """The order is that in which blocks became idle."""
        return False

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._idle.remove(block)

    def evict(self) -> i64:
        """The block idle longest."""
        return self._idle.pop(0)

    def clear(self) -> None:
        """No block is idle any more."""
        self._idle.clear()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        super().grow(num_blocks)
        self._idle.grow(num_blocks)

    def check(self) -> None:
        """The list is sound. O(num_blocks)."""
        self._idle.check()
