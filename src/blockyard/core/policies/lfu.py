"""Least frequently used."""

from typing import Final

from mypy_extensions import i64

from .ghosts import Ghosts
from .heap_policy import HeapPolicy

#: This many contents are counted, evicted ones included.
MAX_COUNTED: Final = 2**20


class LFU(HeapPolicy):
    """The content asked for least often goes first, among equals the one idle longest. O(log n) an operation.

    One count a content, kept across its eviction, for the latest 2**20 contents: a content that comes back has not
    lost its past. It counts a request that caches the content and each request that hits it. A block has the count of
    the moment it became idle: where two hold the same content, requests that the other one serves do not save this one.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._counts = Ghosts(MAX_COUNTED)

    def hit(self, block: i64, key: i64) -> None:  # noqa: ARG002
        """One request more."""
        self._count(key)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:  # noqa: ARG002
        """The number of requests."""
        if self.is_new(block, key):
            self._count(key)
        return self._counts.number(key)

    def _count(self, key: i64) -> None:
        self._counts.remember(key, max(self._counts.number(key), 0) + 1)

    def clear(self) -> None:
        """No block is idle any more, and no content is known."""
        super().clear()
        self._counts.clear()
