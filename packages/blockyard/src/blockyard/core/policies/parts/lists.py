"""Doubly linked lists of block ids in two shared arrays. A block is in at most one of them."""

from typing import Final

from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i32, clear_i64, grown_i32, grown_i64, zeros_i32, zeros_i64

NONE: Final[i64] = -1


class BlockLists:
    """`num_lists` lists, numbered from 0. The head of each is its oldest block. 12 bytes a block, 16 a list.

    All operations are O(1), except `splice`: O(1) per block moved.

    Entry b of the arrays is block b. The lists are rings, and their ends are the entries after those of all blocks.
    """

    def __init__(self, num_lists: int, num_blocks: int) -> None:
        self._num_lists: i64 = num_lists
        self._num_blocks: i64 = num_blocks
        self._next = zeros_i32(num_blocks + num_lists)
        self._prev = zeros_i32(num_blocks + num_lists)
        #: 1 + the list that each block is in; 0 for none.
        self._list = zeros_i32(num_blocks)
        self.length = zeros_i64(num_lists)
        for number in range(self._num_lists):
            self._empty(number)

    def list_of(self, block: i64) -> i64:
        """Return the list that has `block`; -1 for none."""
        return i64(self._list[block]) - 1

    def append(self, number: i64, block: i64) -> None:
        """Append a block, which is in no list, to a list."""
        end = self._num_blocks + number
        last = self._prev[end]
        self._next[i64(last)] = i32(block)
        self._prev[block] = last
        self._next[block] = i32(end)
        self._prev[end] = i32(block)
        self._list[block] = i32(number + 1)
        self.length[number] += 1

    def remove(self, block: i64) -> None:
        """Remove a block from its list."""
        following = self._next[block]
        previous = self._prev[block]
        self._next[i64(previous)] = following
        self._prev[i64(following)] = previous
        self.length[i64(self._list[block]) - 1] -= 1
        self._list[block] = 0

    def head(self, number: i64) -> i64:
        """Return the first block of a list; -1 if it is empty."""
        return self.after(self._num_blocks + number)

    def after(self, block: i64) -> i64:
        """Return the block after `block` in its list; -1 after the last."""
        following = i64(self._next[block])
        return following if following < self._num_blocks else NONE

    def pop(self, number: i64) -> i64:
        """Remove and return the first block of a list, which must not be empty."""
        block = i64(self._next[self._num_blocks + number])
        self.remove(block)
        return block

    def splice(self, number: i64, target: i64) -> None:
        """Move the blocks of a list to the end of another. O(blocks moved)."""
        end = self._num_blocks + target
        block = self.head(number)
        if block == NONE:
            return
        last = self._prev[self._num_blocks + number]
        before = self._prev[end]
        self._next[i64(before)] = i32(block)
        self._prev[block] = before
        self._next[i64(last)] = i32(end)
        self._prev[end] = last
        while block != NONE:
            self._list[block] = i32(target + 1)
            block = self.after(block)
        self.length[target] += self.length[number]
        self.length[number] = 0
        self._empty(number)

    def _empty(self, number: i64) -> None:
        end = self._num_blocks + number
        self._next[end] = i32(end)
        self._prev[end] = i32(end)

    def clear(self) -> None:
        """Empty all lists. O(num_blocks)."""
        clear_i32(self._list)
        clear_i64(self.length)
        for number in range(self._num_lists):
            self._empty(number)

    def blocks(self, number: i64) -> list[int]:
        """Return the blocks of a list, first to last. O(length)."""
        found: list[int] = []
        block = self.head(number)
        while block != NONE and len(found) <= self.length[number]:
            found.append(int(block))
            block = self.after(block)
        return found

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. O(num_blocks). MemoryError changes nothing."""
        old = self._num_blocks
        if num_blocks <= old:
            return
        following = zeros_i32(num_blocks + int(self._num_lists))
        previous = zeros_i32(num_blocks + int(self._num_lists))
        lists = grown_i32(self._list, num_blocks)
        more = num_blocks - old
        for entry in range(old + self._num_lists):
            # The ends come after all blocks.
            place = entry if entry < old else entry + more
            after = i64(self._next[entry])
            before = i64(self._prev[entry])
            after = after if after < old else after + more
            before = before if before < old else before + more
            following[place] = i32(after)
            previous[place] = i32(before)
        self._next = following
        self._prev = previous
        self._list = lists
        self._num_blocks = num_blocks

    def grow_lists(self, num_lists: int) -> None:
        """Make empty lists up to number num_lists - 1. MemoryError changes nothing."""
        following = grown_i32(self._next, int(self._num_blocks) + num_lists)
        previous = grown_i32(self._prev, int(self._num_blocks) + num_lists)
        length = grown_i64(self.length, num_lists)
        first = self._num_lists
        self._next = following
        self._prev = previous
        self.length = length
        self._num_lists = num_lists
        for number in range(first, self._num_lists):
            self._empty(number)

    def check(self) -> None:
        """Check that lengths and memberships agree with the links. O(num_blocks). Raises `InvariantError`."""
        inside = 0
        for number in range(self._num_lists):
            blocks = self.blocks(number)
            inside += len(blocks)
            if len(blocks) != self.length[number] or any(self.list_of(i64(block)) != number for block in blocks):
                raise InvariantError(
                    f"list {number}: {len(blocks)} blocks are linked, but its length is {self.length[number]}"
                )
            if blocks != self._backwards(number):
                raise InvariantError(f"list {number}: its links lead to other blocks forwards than backwards")
        if inside != sum(1 for number in self._list if number != 0):
            raise InvariantError("lists: a block has the number of a list that does not contain it")

    def _backwards(self, number: i64) -> list[int]:
        """Return the blocks of a list, first to last, read from its end."""
        found: list[int] = []
        entry = i64(self._prev[self._num_blocks + number])
        while entry < self._num_blocks and len(found) <= self.length[number]:
            found.append(int(entry))
            entry = i64(self._prev[entry])
        return found[::-1]
