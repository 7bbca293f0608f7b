"""First in, first out."""

from mypy_extensions import i64

from ..arrays import grown_i64, zeros_i64
from .heap_policy import HeapPolicy


class FIFO(HeapPolicy):
    """The content cached first goes first, however often it was hit since. O(log n) an operation.

    Blocks in use are not in line; when they are idle again they come back to their old place, hence a heap.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._number = zeros_i64(num_blocks)
        self._num_contents: i64 = 0

    def priority(self, block: i64, key: i64, depth: i64) -> i64:  # noqa: ARG002
        """The number of the content, counted as contents became idle for the first time."""
        if self.is_new(block, key):
            self._num_contents += 1
            self._number[block] = self._num_contents
        return self._number[block]

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        number = grown_i64(self._number, num_blocks)
        super().grow(num_blocks)
        self._number = number
