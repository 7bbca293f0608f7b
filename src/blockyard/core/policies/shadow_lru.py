"""What a cache of the same size would hold under least recently used, and what of it the real one has given up."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import clear_i32, zeros_i32
from .guard_rows import CHAIN, FIRST, GHOST_WORDS, HIGH, LOW, NEXT, PREV, block_of, first_ghost, new_rows, row_of
from .tracked import LOW_31, mix

#: The end of the shadow's list is the row of block 0, that of the orphans' list the row of ghost 0; both are none.
SHADOW: Final[i64] = FIRST


class ShadowLRU:
    """Idle contents in order of last use, those that are cached and those that the pool has evicted; no tokens.

    Rows (`guard_rows`) of blocks and of ghosts are in the lists. A ghost is a content that the shadow has and the pool
    has not, called *exposed*. A block that the pool has and the shadow has not is an *orphan*: its high key is stored
    as its complement. Orphans stand in a list of their own, in the order in which the shadow dropped them.

    54 to 56 bytes a block, the words of `idle_tree` among them. All operations are O(1) expected.
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
        """Whether `block`, any integer, is a block that is idle."""
        return 0 < block < self.num_blocks and self.rows[row_of(block) + NEXT] != 0

    def is_orphan(self, block: i64) -> bool:
        """Whether the pool has this block, idle, and the shadow has not."""
        return self.rows[row_of(block) + HIGH] < 0

    def key(self, block: i64) -> i64:
        """The key with which `block`, which is not idle, became so last."""
        return self._key(row_of(block))

    def _key(self, row: i64) -> i64:
        return (i64(self.rows[row + HIGH]) << 31) | i64(self.rows[row + LOW])

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
        """Whether a content is exposed, and now no more: it is asked for. O(1) expected."""
        if self.num_exposed == 0:
            return False
        rows = self.rows
        low = i32(key & LOW_31)
        high = i32(key >> 31)
        ghost = i64(self._bucket[self._bucket_of(key)])
        while ghost != 0 and (rows[ghost + LOW] != low or rows[ghost + HIGH] != high):
            ghost = i64(rows[ghost + CHAIN])
        if ghost == 0:
            return False
        self._drop_ghost(ghost)
        return True

    def trim(self, length: i64) -> i64:
        """Drop what was used longest ago until `length` entries remain; how many of the dropped were exposed."""
        ended: i64 = 0
        while self.length > length:
            row = i64(self.rows[SHADOW + NEXT])
            if row >= self._orphans:
                self._drop_ghost(row)
                ended += 1
            else:
                self._unlink(row)
                self._append(row, self._orphans)
                self.rows[row + HIGH] = -1 - self.rows[row + HIGH]
                self.length -= 1
                self.num_orphans += 1
        return ended

    def oldest_orphan(self) -> i64:
        """The orphan that the shadow dropped first; there must be one."""
        return block_of(i64(self.rows[self._orphans + NEXT]))

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
        """The rows in a list, first to last."""
        found: list[int] = []
        row = i64(self.rows[end + NEXT])
        while row != end and len(found) < 2 * self.num_blocks:
            found.append(int(row))
            row = i64(self.rows[row + NEXT])
        return found

    def idle_blocks(self) -> set[int]:
        """All idle blocks. O(num_blocks)."""
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
    """A power of two, between half and all of the blocks."""
    num_buckets = 1
    while 2 * num_buckets <= num_blocks:
        num_buckets *= 2
    return num_buckets
