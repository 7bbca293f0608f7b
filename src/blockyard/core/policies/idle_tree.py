"""Which idle blocks stand below which: children are evicted before their parents."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from .guard_rows import AFTER, BEFORE, CHILD, PARENT, block_of, row_of


class IdleTree:
    """For each block the idle blocks that follow it in some sequence, in a doubly linked list.

    A block is linked while it is idle. Its parent may be held, and is then no candidate. All operations are O(1), but
    `leaf_below`, which walks down.

    rows: of the guard (`guard_rows`), of which this has four words a block; its links are rows too, 0 for none.
    """

    def __init__(self, rows: vec[i32], num_blocks: int) -> None:
        self._rows = rows
        self._num_blocks: i64 = num_blocks

    def parent(self, block: i64) -> i64:
        """The block before `block` in its sequence, as it was told last; 0 if it is the first, or it is not known."""
        parent = i64(self._rows[row_of(block) + PARENT])
        return block_of(parent) if parent != 0 else 0

    def set_parent(self, block: i64, parent: i64) -> None:
        """Say what stands before a block that is not linked; 0 for nothing."""
        self._rows[row_of(block) + PARENT] = i32(row_of(parent)) if parent != 0 else i32(0)

    def link(self, block: i64) -> None:
        """`block` became idle."""
        rows = self._rows
        row = row_of(block)
        parent = i64(rows[row + PARENT])
        if parent != 0:
            first = rows[parent + CHILD]
            rows[row + AFTER] = first
            rows[row + BEFORE] = 0
            if first != 0:
                rows[i64(first) + BEFORE] = i32(row)
            rows[parent + CHILD] = i32(row)

    def unlink(self, block: i64) -> None:
        """`block` is idle no longer. What follows it still does."""
        rows = self._rows
        row = row_of(block)
        parent = i64(rows[row + PARENT])
        if parent != 0:
            after = rows[row + AFTER]
            before = rows[row + BEFORE]
            if before != 0:
                rows[i64(before) + AFTER] = after
            else:
                rows[parent + CHILD] = after
            if after != 0:
                rows[i64(after) + BEFORE] = before

    def leaf_below(self, block: i64) -> i64:
        """An idle block that follows `block` and that nothing idle follows; `block` itself, if nothing follows it.

        O(depth). Parents that are out of date could lead in a circle: then `block`, too.
        """
        rows = self._rows
        below = row_of(block)
        for _step in range(self._num_blocks):
            child = i64(rows[below + CHILD])
            if child == 0:
                return block_of(below)
            below = child
        return block

    def move(self, rows: vec[i32], num_blocks: int) -> None:
        """The guard has other rows, in which this one's words are as they were."""
        self._rows = rows
        self._num_blocks = num_blocks

    def check(self, idle: set[int]) -> None:
        """Exactly the idle blocks with a parent are linked, each below its own. O(num_blocks)."""
        rows = self._rows
        linked = 0
        for block in range(self._num_blocks):
            parent = row_of(block)
            child = i64(rows[parent + CHILD])
            previous: i64 = 0
            while child != 0:
                is_below = i64(rows[child + PARENT]) == parent and i64(rows[child + BEFORE]) == previous
                if not is_below or int(block_of(child)) not in idle:
                    raise InvariantError(f"guard: block {block_of(child)} is linked below block {block} and is not")
                linked += 1
                previous = child
                child = i64(rows[child + AFTER])
        if linked != sum(1 for block in idle if self.parent(i64(block)) != 0):
            raise InvariantError(f"guard: {linked} idle blocks are linked below others, more have a parent")
