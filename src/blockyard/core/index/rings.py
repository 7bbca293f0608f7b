"""Blocks of equal content, in a ring: the table has the oldest of them, and it leads to the others."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import clear_i32, zeros_i32

#: The link of a block alone that has no slot in the table: its neighbour leads to it.
FOLLOWS: Final[i32] = -1


class Rings:
    """Doubly linked rings in two arrays, from older to newer; a block alone has links of 0. O(1) an operation.

    A thousand equal blocks cost a lookup nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.next_equal = zeros_i32(num_blocks)
        self.prev_equal = zeros_i32(num_blocks)

    def is_alone(self, block: i64) -> bool:
        """Whether no other indexed block is equal."""
        return self.next_equal[block] <= 0

    def follows(self, block: i64) -> bool:
        """Return whether the block has no slot in the table."""
        return self.next_equal[block] < 0

    def join(self, oldest: i64, block: i64) -> None:
        """Hang `block` at the end of the ring of `oldest`."""
        newest = i64(self.prev_equal[oldest])
        if newest == 0:
            newest = oldest
        self.next_equal[newest] = i32(block)
        self.prev_equal[block] = i32(newest)
        self.next_equal[block] = i32(oldest)
        self.prev_equal[oldest] = i32(block)

    def leave(self, block: i64) -> i64:
        """Unlink `block`; returns the next older-to-newer duplicate, or 0 when it was alone."""
        after = i64(self.next_equal[block])
        if after == 0:
            return 0
        before = i64(self.prev_equal[block])
        self.next_equal[block] = 0
        self.prev_equal[block] = 0
        if after == before:
            self.next_equal[after] = 0
            self.prev_equal[after] = 0
        else:
            self.next_equal[before] = i32(after)
            self.prev_equal[after] = i32(before)
        return after

    def members(self, oldest: i64) -> list[int]:
        """All blocks of a ring, oldest first. O(duplicates)."""
        ring = [int(oldest)]
        block = i64(self.next_equal[oldest])
        while block > 0 and block != oldest and len(ring) < len(self.next_equal):
            ring.append(int(block))
            if not 0 < block < len(self.next_equal):
                raise InvariantError(f"index: a ring leads to block {block}; the pool has {len(self.next_equal)}")
            block = i64(self.next_equal[block])
        return ring

    def clear(self) -> None:
        """Every block is alone."""
        clear_i32(self.next_equal)
        clear_i32(self.prev_equal)

    def move_into(self, next_equal: vec[i32], prev_equal: vec[i32]) -> None:
        """Put larger arrays in place."""
        self.next_equal = next_equal
        self.prev_equal = prev_equal
