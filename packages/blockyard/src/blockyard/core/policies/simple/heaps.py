"""Policies that evict the idle block with the lowest number: FIFO, LFU, and a score of frequency and recency."""

from typing import Final

from mypy_extensions import i64

from ....arguments import require_int
from ...arrays import clear_i64, grown_i64, zeros_i64
from ..base import EvictionPolicy
from ..parts.heap import BlockHeap
from ..parts.keys import Ghosts

#: This many contents are counted, evicted ones included.
MAX_COUNTED: Final = 2**20
MAX_CREDIT: Final[i64] = 64


class HeapPolicy(EvictionPolicy):
    """Idle blocks in a heap by `priority`. Of equal blocks, the one that was idle longest is evicted. O(log n).

    A subclass computes the priority of a block that becomes idle. A block whose key differs from that of its last
    insertion has new content (`is_new`).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.heap = BlockHeap(num_blocks)
        #: The key with which each block was last inserted; 0 before the first time.
        self.last_key = zeros_i64(num_blocks)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:
        """Return the priority of a block that becomes idle. The lowest is evicted first."""
        raise NotImplementedError

    def is_new(self, block: i64, key: i64) -> bool:
        """Return whether the content of the block became idle for the first time."""
        return self.last_key[block] != key + 1

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        self.heap.insert(block, self.priority(block, key, depth))
        self.last_key[block] = key + 1

    def remove(self, block: i64) -> None:
        self.heap.remove(block)

    def evict(self) -> i64:
        block = self.heap.pop()
        self.last_key[block] = 0
        return block

    def clear(self) -> None:
        self.heap.clear()
        clear_i64(self.last_key)

    def grow(self, num_blocks: int) -> None:
        last_key = grown_i64(self.last_key, num_blocks)
        self.heap.grow(num_blocks)
        super().grow(num_blocks)
        self.last_key = last_key

    def check(self) -> None:
        self.heap.check()


class FIFO(HeapPolicy):
    """Evicts the content that was cached first, however often it was hit. O(log n) per operation.

    Blocks in use are not in the queue and return to their old position when they are idle again, hence the heap.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._number = zeros_i64(num_blocks)
        self._num_contents: i64 = 0

    def priority(self, block: i64, key: i64, depth: i64) -> i64:  # noqa: ARG002
        """Return a number that counts contents as they first became idle."""
        if self.is_new(block, key):
            self._num_contents += 1
            self._number[block] = self._num_contents
        return self._number[block]

    def grow(self, num_blocks: int) -> None:
        number = grown_i64(self._number, num_blocks)
        super().grow(num_blocks)
        self._number = number


class LFU(HeapPolicy):
    """Evicts the content with the fewest requests, and of equal ones the one that was idle longest.

    O(log n) per operation. Counts are kept for the latest 2**20 contents, evicted ones included. A count includes the
    request that cached the content and each request that hit it. A block keeps the count of the moment it became idle,
    so a block does not gain by hits of another block with the same content.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._counts = Ghosts(MAX_COUNTED)

    def hit(self, block: i64, key: i64) -> None:  # noqa: ARG002
        self._count(key)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:  # noqa: ARG002
        """Return the number of requests."""
        if self.is_new(block, key):
            self._count(key)
        return self._counts.number(key)

    def _count(self, key: i64) -> None:
        self._counts.remember(key, max(self._counts.number(key), 0) + 1)

    def clear(self) -> None:
        super().clear()
        self._counts.clear()


class Score(HeapPolicy):
    """Recency, plus a credit for each hit, minus a cost for each block before it in its sequence.

    The score of a block that becomes idle is the number of events so far, plus `hit_credit` events for each of its hits
    (at most 64), minus `depth_cost` events for each block before it in its sequence. It does not change while the block
    is idle. Time would lower all scores alike, so their order stays and a heap is enough, as in GreedyDual (Young,
    1994). O(log n) per operation.

    Args:
        num_blocks: blocks of the pool.
        hit_credit: events per hit, 0 to 2**31 - 1; None for a quarter of the pool.
        depth_cost: events per block before it, -2**31 to 2**31 - 1. Above 0 the beginning of a long prefix stays
            longer, below 0 its end does.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    def __init__(self, num_blocks: int, hit_credit: object = None, depth_cost: object = 0) -> None:
        super().__init__(num_blocks)
        credit = max(num_blocks // 4, 1) if hit_credit is None else require_int("hit_credit", hit_credit, 0, 2**31 - 1)
        self._hit_credit: i64 = credit
        self._depth_cost: i64 = require_int("depth_cost", depth_cost, -(2**31), 2**31 - 1)
        self._hits = zeros_i64(num_blocks)
        self._num_events: i64 = 0

    def hit(self, block: i64, key: i64) -> None:
        """Count a hit, which may precede the first time that the content is idle."""
        self._num_events += 1
        if self.is_new(block, key):
            self.last_key[block] = key + 1
            self._hits[block] = 0
        self._hits[block] = min(self._hits[block] + 1, MAX_CREDIT)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:
        """Return the score at this moment."""
        self._num_events += 1
        if self.is_new(block, key):
            self._hits[block] = 0
        return self._num_events + self._hits[block] * self._hit_credit - depth * self._depth_cost

    def grow(self, num_blocks: int) -> None:
        hits = grown_i64(self._hits, num_blocks)
        super().grow(num_blocks)
        self._hits = hits
