"""A score of recency, frequency and prefix length."""

from typing import Final

from mypy_extensions import i64

from ...arguments import require_int
from ..arrays import grown_i64, zeros_i64
from .heap_policy import HeapPolicy

MAX_CREDIT: Final[i64] = 64


class Score(HeapPolicy):
    """Recency, plus a credit for each hit, less a cost for each block before it in its sequence.

    The score of a block that becomes idle is the number of events so far, plus `hit_credit` events for each of its
    hits (at most 64), minus `depth_cost` events for each block before it in its sequence. It never changes while
    the block is idle: all scores would lose the same with time, so their order stays, as in GreedyDual (Young,
    1994), and a heap holds them. O(log n) an operation.

    hit_credit: events that a hit is worth, 0 to 2**31 - 1; None for a quarter of the pool. depth_cost: -2**31 to
    2**31 - 1; 0, the default, leaves the prefix's length out; above 0 the beginning of a long prefix is kept longer,
    below 0 its end is. Raises `InvalidArgument` for values outside these limits.
    """

    def __init__(self, num_blocks: int, hit_credit: object = None, depth_cost: object = 0) -> None:
        super().__init__(num_blocks)
        credit = max(num_blocks // 4, 1) if hit_credit is None else require_int("hit_credit", hit_credit, 0, 2**31 - 1)
        self._hit_credit: i64 = credit
        self._depth_cost: i64 = require_int("depth_cost", depth_cost, -(2**31), 2**31 - 1)
        self._hits = zeros_i64(num_blocks)
        self._num_events: i64 = 0

    def hit(self, block: i64, key: i64) -> None:
        """One hit more; it may come before the content was idle for the first time."""
        self._num_events += 1
        if self.is_new(block, key):
            self.last_key[block] = key + 1
            self._hits[block] = 0
        self._hits[block] = min(self._hits[block] + 1, MAX_CREDIT)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:
        """The score at this moment."""
        self._num_events += 1
        if self.is_new(block, key):
            self._hits[block] = 0
        return self._num_events + self._hits[block] * self._hit_credit - depth * self._depth_cost

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        hits = grown_i64(self._hits, num_blocks)
        super().grow(num_blocks)
        self._hits = hits
