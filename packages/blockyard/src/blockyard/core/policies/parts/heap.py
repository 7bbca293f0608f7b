"""A binary heap of block ids, from which any block can be removed."""

from struct import pack, unpack
from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import clear_i64, grown_i64, zeros_i64

#: All bits of a float but its sign.
MAGNITUDE: Final = 2**63 - 1


class BlockHeap:
    """Blocks ordered by (priority, tie). Operations are O(log n), membership is O(1).

    The heap assigns `tie`, a counter, so of equal priorities the one inserted first comes first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_items: i64 = 0
        self._heap = zeros_i64(num_blocks)
        #: 1 + the position of each block in the heap; 0 if it is not in it.
        self._place = zeros_i64(num_blocks)
        self._priority = zeros_i64(num_blocks)
        self._tie = zeros_i64(num_blocks)
        self._num_inserted: i64 = 0

    def holds(self, block: i64) -> bool:
        return self._place[block] != 0

    def insert(self, block: i64, priority: i64) -> None:
        """Add a block that is not in the heap."""
        self._num_inserted += 1
        self._priority[block] = priority
        self._tie[block] = self._num_inserted
        self._heap[self.num_items] = block
        self.num_items += 1
        self._sift_up(self.num_items - 1)

    def remove(self, block: i64) -> None:
        """Remove a block, which must be in the heap."""
        hole = self._place[block] - 1
        self._place[block] = 0
        self.num_items -= 1
        last = self._heap[self.num_items]
        if last != block:
            self._heap[hole] = last
            self._place[last] = hole + 1
            self._sift_up(hole)
            self._sift_down(self._place[last] - 1)

    def first(self) -> i64:
        """Return the first block; the heap must not be empty."""
        return self._heap[0]

    def lowest(self) -> i64:
        """Return the priority of the first block."""
        return self._priority[self._heap[0]]

    def pop(self) -> i64:
        """Remove and return the first block."""
        block = self._heap[0]
        self.remove(block)
        return block

    def is_before(self, block: i64, other: i64) -> bool:
        """Return whether `block` comes before `other`. Both must be in the heap."""
        if self._priority[block] != self._priority[other]:
            return self._priority[block] < self._priority[other]
        return self._tie[block] < self._tie[other]

    def _sift_up(self, place: i64) -> None:
        block = self._heap[place]
        while place > 0:
            above = (place - 1) >> 1
            if not self.is_before(block, self._heap[above]):
                break
            self._put(place, self._heap[above])
            place = above
        self._put(place, block)

    def _sift_down(self, place: i64) -> None:
        block = self._heap[place]
        below = 2 * place + 1
        while below < self.num_items:
            if below + 1 < self.num_items and self.is_before(self._heap[below + 1], self._heap[below]):
                below += 1
            if not self.is_before(self._heap[below], block):
                break
            self._put(place, self._heap[below])
            place = below
            below = 2 * place + 1
        self._put(place, block)

    def _put(self, place: i64, block: i64) -> None:
        self._heap[place] = block
        self._place[block] = place + 1

    def clear(self) -> None:
        """Remove all blocks. O(num_blocks)."""
        clear_i64(self._place)
        self.num_items = 0

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1."""
        heap = grown_i64(self._heap, num_blocks)
        place = grown_i64(self._place, num_blocks)
        priority = grown_i64(self._priority, num_blocks)
        tie = grown_i64(self._tie, num_blocks)
        self._heap = heap
        self._place = place
        self._priority = priority
        self._tie = tie

    def blocks(self) -> vec[i64]:
        """Return a copy of all blocks, in no particular order."""
        return self._heap[: self.num_items]

    def check(self) -> None:
        """Raise `InvariantError` unless every block is at its position and none precedes its parent. O(num_blocks)."""
        for place in range(self.num_items):
            block = self._heap[place]
            if self._place[block] != place + 1:
                raise InvariantError(f"heap: block {block} is at position {place}, not {self._place[block] - 1}")
            if place > 0 and self.is_before(block, self._heap[(place - 1) >> 1]):
                raise InvariantError(f"heap: block {block} at position {place} comes before its parent")
        inside = sum(1 for place in self._place if place != 0)
        if inside != self.num_items:
            raise InvariantError(f"heap: {inside} blocks have a position, but num_items is {self.num_items}")


def order_of(time: float) -> i64:
    """Return an integer for a time that sorts like the time."""
    bits = int(unpack("<q", pack("<d", time + 0.0))[0])
    return bits if bits >= 0 else -(bits & MAGNITUDE)
