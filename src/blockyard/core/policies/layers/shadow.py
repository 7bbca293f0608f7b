"""What a cache of the same size would hold under least recently used, and which idle blocks stand below which.

What a guard keeps of a block and of an exposed content stands in one row each, so that an event touches one cache line.
"""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ....errors import InvariantError
from ...arrays import clear_i32, zeros_i32
from ..parts.keys import LOW_31, mix

#: Words before the first row. A large vec begins 40 bytes into a cache line; two rows of blocks fill a line from here.
FIRST: Final[i64] = 6
#: Words of a row: of a block, and of a ghost, which is a content that only the shadow has.
BLOCK_WORDS: Final[i64] = 8
GHOST_WORDS: Final[i64] = 5

#: Both: the rows after and before it in its list (`ShadowLRU`), 0 for none, and the low and high 31 bits of the key.
NEXT: Final[i64] = 0
PREV: Final[i64] = 1
LOW: Final[i64] = 2
HIGH: Final[i64] = 3
#: A ghost: the next in its bucket, or the next free one.
CHAIN: Final[i64] = 4
#: A block (`IdleTree`): the block before it in its sequence, its first child, and its siblings.
PARENT: Final[i64] = 4
CHILD: Final[i64] = 5
AFTER: Final[i64] = 6
BEFORE: Final[i64] = 7

#: The end of the shadow's list is the row of block 0, that of the orphans' list the row of ghost 0; both are none.
SHADOW: Final[i64] = FIRST


def row_of(block: i64) -> i64:
    """Return where the row of a block begins."""
    return FIRST + BLOCK_WORDS * block


def block_of(row: i64) -> i64:
    """Return the block whose row begins there."""
    return (row - FIRST) >> 3


def first_ghost(num_blocks: i64) -> i64:
    """Return where the row of ghost 0 begins, behind those of all blocks."""
    return FIRST + BLOCK_WORDS * num_blocks


def new_rows(num_blocks: int) -> vec[i32]:
    """Empty rows for `num_blocks` blocks and as many ghosts, 52 bytes of each."""
    return zeros_i32(int(FIRST) + int(BLOCK_WORDS + GHOST_WORDS) * num_blocks)


class ShadowLRU:
    """Idle contents in order of last use, those that are cached and those that the pool has evicted; no tokens.

    Rows of blocks and of ghosts are in the lists. A ghost is a content that the shadow has and the pool
    has not, called *exposed*. A block that the pool has and the shadow has not is an *orphan*: its high key is stored
    as its complement. Orphans stand in a list of their own, in the order in which the shadow dropped them.

    54 to 56 bytes a block, the words of `IdleTree` among them. All operations are O(1) expected.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_exposed: i64 = 0
        self.num_orphans: i64 = 0
        #: Entries of the shadow, exposed ones included.
        self.length: i64 = 0
        self.num_blocks: i64 = num_blocks
        self.rows = new_rows(num_blocks)
        #: Ghosts by a hash of their key: the first of each bucket, the next after each. Free ones are chained too.
        self._bucket = zeros_i32(_num_buckets(num_blocks))
        self._start_lists()

    def _start_lists(self) -> None:
        #: The orphans' end; rows from here on are ghosts'.
        self._orphans = first_ghost(self.num_blocks)
        self._free_ghost: i64 = 0
        self._unused_ghost = self._orphans + GHOST_WORDS
        for end in (SHADOW, self._orphans):
            self.rows[end + NEXT] = i32(end)
            self.rows[end + PREV] = i32(end)
        self.num_exposed = 0
        self.num_orphans = 0
        self.length = 0

    def is_idle(self, block: i64) -> bool:
        """Return whether `block`, any integer, is a block that is idle."""
        return 0 < block < self.num_blocks and self.rows[row_of(block) + NEXT] != 0

    def is_orphan(self, block: i64) -> bool:
        """Return whether the pool has this block, idle, and the shadow has not."""
        return self.rows[row_of(block) + HIGH] < 0

    def key(self, block: i64) -> i64:
        """Return the key with which `block` became idle last."""
        return self._key(row_of(block))

    def _key(self, row: i64) -> i64:
        high = i64(self.rows[row + HIGH])
        if high < 0:
            high = -1 - high
        return (high << 31) | i64(self.rows[row + LOW])

    def insert(self, block: i64, key: i64) -> None:
        """`block`, which is not idle, became idle: the shadow has it too, used last."""
        row = row_of(block)
        self.rows[row + LOW] = i32(key & LOW_31)
        self.rows[row + HIGH] = i32(key >> 31)
        self._append(row, SHADOW)
        self.length += 1

    def remove(self, block: i64) -> None:
        """The idle `block` is held again, or gone in the pool and in the shadow."""
        row = row_of(block)
        high = self.rows[row + HIGH]
        if high < 0:
            self.rows[row + HIGH] = -1 - high
            self.num_orphans -= 1
        else:
            self.length -= 1
        self._unlink(row)
        self.rows[row + NEXT] = 0

    def expose(self, block: i64) -> None:
        """The pool evicts `block`, which the shadow keeps: a ghost stands in its place."""
        rows = self.rows
        row = row_of(block)
        ghost = self._new_ghost()
        for word in range(CHAIN):
            rows[ghost + word] = rows[row + word]
        rows[i64(rows[row + PREV]) + NEXT] = i32(ghost)
        rows[i64(rows[row + NEXT]) + PREV] = i32(ghost)
        rows[row + NEXT] = 0
        self._put_in_bucket(ghost)
        self.num_exposed += 1

    def ask(self, key: i64) -> bool:
        """Return whether a content is exposed, and now no more: it is asked for. O(1) expected."""
        ghost = self._find(key)
        if ghost == 0:
            return False
        self._drop_ghost(ghost)
        return True

    def is_exposed(self, key: i64) -> bool:
        """Return whether the shadow has a content that the pool has evicted from the shadow's block. O(1) expected."""
        return self._find(key) != 0

    def _find(self, key: i64) -> i64:
        if self.num_exposed == 0:
            return 0
        rows = self.rows
        low = i32(key & LOW_31)
        high = i32(key >> 31)
        ghost = i64(self._bucket[self._bucket_of(key)])
        while ghost != 0 and (rows[ghost + LOW] != low or rows[ghost + HIGH] != high):
            ghost = i64(rows[ghost + CHAIN])
        return ghost

    def trim(self, length: i64) -> i64:
        """Drop what was used longest ago until `length` entries remain; how many of the dropped were exposed."""
        ended: i64 = 0
        while self.length > length:
            row = i64(self.rows[SHADOW + NEXT])
            if row >= self._orphans:
                self._drop_ghost(row)
                ended += 1
            else:
                self.drop(block_of(row))
        return ended

    def drop(self, block: i64) -> None:
        """The shadow has an idle block no longer: it is an orphan, the latest."""
        row = row_of(block)
        self._unlink(row)
        self._append(row, self._orphans)
        self.rows[row + HIGH] = -1 - self.rows[row + HIGH]
        self.length -= 1
        self.num_orphans += 1

    def oldest_orphan(self) -> i64:
        """Return the orphan that the shadow dropped first; there must be one."""
        return block_of(i64(self.rows[self._orphans + NEXT]))

    def next_orphan(self, block: i64) -> i64:
        """Return the orphan that the shadow dropped next after this one; 0 after the last."""
        row = i64(self.rows[row_of(block) + NEXT])
        return block_of(row) if row != self._orphans else 0

    def _append(self, row: i64, end: i64) -> None:
        rows = self.rows
        last = rows[end + PREV]
        rows[row + NEXT] = i32(end)
        rows[row + PREV] = last
        rows[i64(last) + NEXT] = i32(row)
        rows[end + PREV] = i32(row)

    def _unlink(self, row: i64) -> None:
        rows = self.rows
        after = rows[row + NEXT]
        before = rows[row + PREV]
        rows[i64(before) + NEXT] = after
        rows[i64(after) + PREV] = before

    # Ghosts: as many as blocks, so there is always one free.

    def _new_ghost(self) -> i64:
        ghost = self._free_ghost
        if ghost != 0:
            self._free_ghost = i64(self.rows[ghost + CHAIN])
            return ghost
        ghost = self._unused_ghost
        self._unused_ghost += GHOST_WORDS
        return ghost

    def _bucket_of(self, key: i64) -> i64:
        return mix(key) & (i64(len(self._bucket)) - 1)

    def _put_in_bucket(self, ghost: i64) -> None:
        bucket = self._bucket_of(self._key(ghost))
        self.rows[ghost + CHAIN] = self._bucket[bucket]
        self._bucket[bucket] = i32(ghost)

    def _drop_ghost(self, ghost: i64) -> None:
        self._take_from_bucket(ghost)
        self._unlink(ghost)
        self.rows[ghost + CHAIN] = i32(self._free_ghost)
        self._free_ghost = ghost
        self.length -= 1
        self.num_exposed -= 1

    def _take_from_bucket(self, ghost: i64) -> None:
        rows = self.rows
        bucket = self._bucket_of(self._key(ghost))
        other = i64(self._bucket[bucket])
        if other == ghost:
            self._bucket[bucket] = rows[ghost + CHAIN]
            return
        while i64(rows[other + CHAIN]) != ghost:
            other = i64(rows[other + CHAIN])
        rows[other + CHAIN] = rows[ghost + CHAIN]

    # The size, and checks.

    def clear(self) -> None:
        """Forget all. O(num_blocks)."""
        clear_i32(self.rows)
        clear_i32(self._bucket)
        self._start_lists()

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1, in new rows. O(num_blocks)."""
        rows = new_rows(num_blocks)
        bucket = zeros_i32(_num_buckets(num_blocks))
        shadow = self._entries(SHADOW)
        orphans = self._entries(self._orphans)
        old = self.rows
        old_end = self._orphans
        for word in range(old_end):
            rows[word] = old[word]
        self.rows = rows
        self._bucket = bucket
        self.num_blocks = num_blocks
        self._start_lists()
        self.length = i64(len(shadow))
        self.num_orphans = i64(len(orphans))
        for entry in shadow:
            self._append_grown(i64(entry), old, old_end)
        for entry in orphans:
            self._append(i64(entry), self._orphans)

    def _append_grown(self, row: i64, old: vec[i32], old_end: i64) -> None:
        """An entry of the shadow: a block stays in its row, a ghost gets another."""
        if row < old_end:
            self._append(row, SHADOW)
            return
        ghost = self._new_ghost()
        self.rows[ghost + LOW] = old[row + LOW]
        self.rows[ghost + HIGH] = old[row + HIGH]
        self._put_in_bucket(ghost)
        self._append(ghost, SHADOW)
        self.num_exposed += 1

    def _entries(self, end: i64) -> list[int]:
        """Return the rows in a list, first to last."""
        found: list[int] = []
        row = i64(self.rows[end + NEXT])
        while row != end and len(found) < 2 * self.num_blocks:
            found.append(int(row))
            row = i64(self.rows[row + NEXT])
        return found

    def idle_blocks(self) -> set[int]:
        """Return all idle blocks. O(num_blocks)."""
        return {block for block in range(1, int(self.num_blocks)) if self.rows[row_of(i64(block)) + NEXT] != 0}

    def check(self) -> None:
        """Lists, counts and buckets agree. O(num_blocks). Raises `InvariantError`."""
        shadow = self._entries(SHADOW)
        orphans = self._entries(self._orphans)
        ghosts = [row for row in shadow if row >= self._orphans]
        if len(shadow) != self.length or len(orphans) != self.num_orphans or len(ghosts) != self.num_exposed:
            raise InvariantError(
                f"guard: {len(shadow)} contents in the shadow, {len(ghosts)} exposed, {len(orphans)} orphans; counted "
                f"{self.length}, {self.num_exposed}, {self.num_orphans}"
            )
        self._check_places([row for row in shadow if row < self._orphans], False)
        self._check_places(orphans, True)
        if len(self.idle_blocks()) != len(shadow) - len(ghosts) + len(orphans):
            raise InvariantError("guard: a block says it is idle and is in no list")
        for ghost in ghosts:
            self._check_found(i64(ghost))

    def _check_places(self, rows: list[int], are_orphans: bool) -> None:
        for row in rows:
            block = block_of(i64(row))
            if self.is_orphan(block) != are_orphans:
                raise InvariantError(f"guard: block {block} is in the list of orphans or not, and says otherwise")

    def _check_found(self, ghost: i64) -> None:
        key = self._key(ghost)
        other = i64(self._bucket[self._bucket_of(key)])
        while other != 0 and other != ghost:
            other = i64(self.rows[other + CHAIN])
        if other == 0:
            raise InvariantError(f"guard: the exposed content {key} is not found by its key")


def _num_buckets(num_blocks: int) -> int:
    """Return a power of two, between half and all of the blocks."""
    num_buckets = 1
    while 2 * num_buckets <= num_blocks:
        num_buckets *= 2
    return num_buckets


class IdleTree:
    """For each block the idle blocks that follow it in some sequence, in a doubly linked list.

    A block is linked while it is idle. Its parent may be held, and is then no candidate. All operations are O(1), but
    `leaf_below`, which walks down.

    rows: of the guard, of which this has four words a block; its links are rows too, 0 for none.
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
