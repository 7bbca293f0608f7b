"""Doubly linked lists over block ids, several in the same two arrays: a block is in one of them at most."""

from mypy_extensions import i64

from ...errors import InvariantError
from ..arrays import clear_i64, zeros_i64


class BlockLists:
    """`num_lists` lists, numbered from 0; the head of each is what was appended first. All operations are O(1).

    Entry 0 to num_lists - 1 of the arrays are the ends of the lists, block b is entry num_lists + b.
    """

    def __init__(self, num_lists: int, num_blocks: int) -> None:
        self._num_lists: i64 = num_lists
        self._next = zeros_i64(num_lists + num_blocks)
        self._prev = zeros_i64(num_lists + num_blocks)
        #: 1 + the list that each block is in; 0 for none.
        self._list = zeros_i64(num_blocks)
        self.length = zeros_i64(num_lists)
        self.clear()

    def list_of(self, block: i64) -> i64:
        """The list that `block` is in; -1 for none."""
        return self._list[block] - 1

    def append(self, number: i64, block: i64) -> None:
        """Put a block that is in no list at the end of one."""
        entry = self._num_lists + block
        last = self._prev[number]
        self._next[last] = entry
        self._prev[entry] = last
        self._next[entry] = number
        self._prev[number] = entry
        self._list[block] = number + 1
        self.length[number] += 1

    def remove(self, block: i64) -> None:
        """Take a block out of its list."""
        entry = self._num_lists + block
        self._next[self._prev[entry]] = self._next[entry]
        self._prev[self._next[entry]] = self._prev[entry]
        self.length[self._list[block] - 1] -= 1
        self._list[block] = 0

    def head(self, number: i64) -> i64:
        """The first block of a list that is not empty."""
        return self._next[number] - self._num_lists

    def after(self, block: i64) -> i64:
        """The block that follows `block` in its list; below 0 after the last."""
        return self._next[self._num_lists + block] - self._num_lists

    def pop(self, number: i64) -> i64:
        """Take the first block out of a list that is not empty."""
        block = self.head(number)
        self.remove(block)
        return block

    def clear(self) -> None:
        """Empty all lists. O(num_blocks)."""
        clear_i64(self._list)
        for number in range(self._num_lists):
            self._next[number] = number
            self._prev[number] = number
            self.length[number] = 0

    def blocks(self, number: i64) -> list[int]:
        """The blocks of a list, first to last. O(length)."""
        found: list[int] = []
        entry = self._next[number]
        while entry != number and len(found) <= self.length[number]:
            found.append(int(entry - self._num_lists))
            entry = self._next[entry]
        return found

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. O(num_blocks)."""
        kept = [self.blocks(number) for number in range(self._num_lists)]
        following = zeros_i64(int(self._num_lists) + num_blocks)
        previous = zeros_i64(int(self._num_lists) + num_blocks)
        lists = zeros_i64(num_blocks)
        self._next = following
        self._prev = previous
        self._list = lists
        self.clear()
        for number, blocks in enumerate(kept):
            for block in blocks:
                self.append(number, block)

    def check(self) -> None:
        """Lengths and memberships agree with the links. O(num_blocks). Raises `InvariantError`."""
        inside = 0
        for number in range(self._num_lists):
            blocks = self.blocks(number)
            inside += len(blocks)
            if len(blocks) != self.length[number] or any(self._list[i64(b)] != number + 1 for b in blocks):
                raise InvariantError(f"list {number}: {len(blocks)} blocks are linked, {self.length[number]} counted")
        if inside != sum(1 for number in self._list if number != 0):
            raise InvariantError("lists: a block says it is in a list that does not have it")
