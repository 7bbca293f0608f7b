"""The idle blocks of each session, in two lists: of what it holds now, and of what it held before."""

from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import clear_i32, grown_i32, zeros_i32


class SessionLists:
    """Linked lists of blocks. List 2 s has those of slot s in the order in which they became idle, 2 s + 1 old ones.

    A sequence is let go from its last block to its first, so the head of a list is a leaf. 8 bytes a block, 24 a slot.
    All operations are O(1).
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self._next = zeros_i32(num_blocks)
        self._prev = zeros_i32(num_blocks)
        self._head = zeros_i32(2 * num_slots)
        self._tail = zeros_i32(2 * num_slots)

    def head(self, number: i64) -> i64:
        """The first block of a list; 0 if it is empty."""
        return i64(self._head[number])

    def after(self, block: i64) -> i64:
        """The block that follows in its list; 0 for none."""
        return i64(self._next[block])

    def append(self, number: i64, block: i64) -> None:
        """Put a block that is in no list at the end of one."""
        tail = self._tail[number]
        self._prev[block] = tail
        self._next[block] = 0
        if tail == 0:
            self._head[number] = i32(block)
        else:
            self._next[i64(tail)] = i32(block)
        self._tail[number] = i32(block)

    def remove(self, number: i64, block: i64) -> None:
        """Take a block out of the list that it is in."""
        following = self._next[block]
        previous = self._prev[block]
        if previous == 0:
            self._head[number] = following
        else:
            self._next[i64(previous)] = following
        if following == 0:
            self._tail[number] = previous
        else:
            self._prev[i64(following)] = previous

    def retire(self, slot: i64) -> None:
        """What the slot holds now is old: it goes behind what was old before."""
        current = 2 * slot
        head = self._head[current]
        if head == 0:
            return
        old = current + 1
        tail = self._tail[old]
        if tail == 0:
            self._head[old] = head
        else:
            self._next[i64(tail)] = head
            self._prev[i64(head)] = tail
        self._tail[old] = self._tail[current]
        self._head[current] = 0
        self._tail[current] = 0

    def clear(self) -> None:
        """Empty all lists. O(slots)."""
        clear_i32(self._head)
        clear_i32(self._tail)

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1 at least."""
        if num_blocks <= len(self._next):
            # A growth that failed elsewhere had come this far.
            return
        following = grown_i32(self._next, num_blocks)
        previous = grown_i32(self._prev, num_blocks)
        self._next = following
        self._prev = previous

    def grow_slots(self, num_slots: int) -> None:
        """Make room for slots up to num_slots - 1."""
        head = grown_i32(self._head, 2 * num_slots)
        tail = grown_i32(self._tail, 2 * num_slots)
        self._head = head
        self._tail = tail

    def blocks(self, number: i64) -> list[int]:
        """The blocks of a list, first to last. O(length)."""
        found: list[int] = []
        block = i64(self._head[number])
        while block != 0 and len(found) <= len(self._next):
            found.append(int(block))
            block = i64(self._next[block])
        return found

    def check(self) -> None:
        """Links lead both ways, and ends are ends. O(blocks + slots). Raises `InvariantError`."""
        for number in range(i64(len(self._head))):
            previous: i64 = 0
            for block in self.blocks(number):
                if self._prev[i64(block)] != previous:
                    raise InvariantError(
                        f"hints: block {block} of list {number} follows block {self._prev[i64(block)]}, not {previous}"
                    )
                previous = i64(block)
            if self._tail[number] != previous:
                raise InvariantError(f"hints: list {number} ends with {self._tail[number]}, not {previous}")
