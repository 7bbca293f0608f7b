"""Policies that give each idle block a number and evict the lowest: FIFO, LFU, and a score of both and recency."""

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
    """Keeps idle blocks in a heap by `priority`; among equals the one idle longest goes first. O(log n).

    A subclass says what a block's priority is when it becomes idle. A block whose key differs from the last one it was
    inserted with holds a new content (`is_new`).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.heap = BlockHeap(num_blocks)
        #: The key with which each block was last inserted; 0 before the first time.
        self.last_key = zeros_i64(num_blocks)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:
        """The priority of a block that becomes idle; the lowest goes first."""
        raise NotImplementedError

    def is_new(self, block: i64, key: i64) -> bool:
        """Whether the block's content became idle for the first time."""
        return self.last_key[block] != key + 1

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self.heap.insert(block, self.priority(block, key, depth))
        self.last_key[block] = key + 1

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self.heap.remove(block)

    def evict(self) -> i64:
        """The idle block of the lowest priority."""
        block = self.heap.pop()
        self.last_key[block] = 0
        return block

    def clear(self) -> None:
        """No block is idle any more."""
        self.heap.clear()
        clear_i64(self.last_key)

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        last_key = grown_i64(self.last_key, num_blocks)
        self.heap.grow(num_blocks)
        super().grow(num_blocks)
        self.last_key = last_key

    def check(self) -> None:
        """The heap is sound. O(num_blocks)."""
        self.heap.check()


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
