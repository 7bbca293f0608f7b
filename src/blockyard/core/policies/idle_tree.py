"""Which idle blocks stand below which: children are evicted before their parents."""

from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import clear_i32, grown_i32, zeros_i32


class IdleTree:
    """For each block the idle blocks that follow it in some sequence, in a doubly linked list. 16 bytes a block.

    A block is linked while it is idle. Its parent may be held, and is then no candidate. All operations are O(1), but
    `leaf_below`, which walks down.
    """

    def __init__(self, num_blocks: int) -> None:
        #: The block before each in its sequence, as it was told last; 0 for none.
        self._parent = zeros_i32(num_blocks)
        self._first_child = zeros_i32(num_blocks)
        self._next = zeros_i32(num_blocks)
        self._prev = zeros_i32(num_blocks)

    def parent(self, block: i64) -> i64:
        """The block before `block` in its sequence; 0 if it is the first, or it is not known."""
        return i64(self._parent[block])

    def set_parent(self, block: i64, parent: i64) -> None:
        """Say what stands before a block that is not linked."""
        self._parent[block] = i32(parent)

    def link(self, block: i64) -> None:
        """`block` became idle."""
        parent = i64(self._parent[block])
        if parent != 0:
            first = self._first_child[parent]
            self._next[block] = first
            self._prev[block] = 0
            if first != 0:
                self._prev[i64(first)] = i32(block)
            self._first_child[parent] = i32(block)

    def unlink(self, block: i64) -> None:
        """`block` is idle no longer. What follows it still does."""
        parent = i64(self._parent[block])
        if parent != 0:
            following = self._next[block]
            previous = self._prev[block]
            if previous != 0:
                self._next[i64(previous)] = following
            else:
                self._first_child[parent] = following
            if following != 0:
                self._prev[i64(following)] = previous

    def leaf_below(self, block: i64) -> i64:
        """An idle block that follows `block` and that nothing idle follows; `block` itself, if nothing follows it.

        O(depth). Parents that are out of date could lead in a circle: then `block`, too.
        """
        below = block
        for _ in range(i64(len(self._parent))):
            child = i64(self._first_child[below])
            if child == 0:
                return below
            below = child
        return block

    def clear(self) -> None:
        """No block is idle, and no parent known. O(num_blocks)."""
        clear_i32(self._parent)
        clear_i32(self._first_child)

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1."""
        parent = grown_i32(self._parent, num_blocks)
        first_child = grown_i32(self._first_child, num_blocks)
        following = grown_i32(self._next, num_blocks)
        previous = grown_i32(self._prev, num_blocks)
        self._parent = parent
        self._first_child = first_child
        self._next = following
        self._prev = previous

    def check(self, idle: set[int]) -> None:
        """Exactly the idle blocks with a parent are linked, each below its own. O(num_blocks)."""
        linked = 0
        for parent in range(i64(len(self._parent))):
            child = i64(self._first_child[parent])
            previous: i64 = 0
            while child != 0:
                if self._parent[child] != parent or self._prev[child] != previous or int(child) not in idle:
                    raise InvariantError(f"guard: block {child} is linked below block {parent} and is not")
                linked += 1
                previous = child
                child = i64(self._next[child])
        if linked != sum(1 for block in idle if self._parent[i64(block)] != 0):
            raise InvariantError(f"guard: {linked} idle blocks are linked below others, more have a parent")
