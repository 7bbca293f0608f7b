"""The LRU policy."""

from mypy_extensions import i64

from ..base import EvictionPolicy
from ..parts.lists import BlockLists


class LRU(EvictionPolicy):
    """Least recently used: evicts the block that became idle first. O(1) per operation.

    The free queue of a pool has the same order, so a pool with `"lru"` calls no policy. This class is for layers around
    a policy (`Retention`) and for comparison.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._idle = BlockLists(1, num_blocks)

    def insert(self, block: i64, key: i64, depth: i64) -> None:  # noqa: ARG002
        self._idle.append(0, block)

    def needs_hits(self) -> bool:
        return False

    def remove(self, block: i64) -> None:
        self._idle.remove(block)

    def evict(self) -> i64:
        return self._idle.pop(0)

    def clear(self) -> None:
        self._idle.clear()

    def grow(self, num_blocks: int) -> None:
        super().grow(num_blocks)
        self._idle.grow(num_blocks)

    def check(self) -> None:
        self._idle.check()
