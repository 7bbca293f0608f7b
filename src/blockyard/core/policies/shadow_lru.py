"""What a cache of the same size would hold under least recently used, and what of it the real one has given up."""

from typing import Final

from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import clear_i32, grown_i32, grown_i64, zeros_i32, zeros_i64
from .tracked import mix

#: Where an idle block is: in neither list, among the shadow's, or among those that the shadow has dropped.
NOWHERE: Final[i32] = 0
IN_SHADOW: Final[i32] = 1
ORPHAN: Final[i32] = 2
#: The ends of the two lists are the entries of block 0 and of ghost 0, which are none.
SHADOW: Final[i64] = 0
ORPHANS: Final[i64] = 1


class ShadowLRU:
    """Idle contents in order of last use, those that are cached and those that the pool has evicted; no tokens.

    Entry 2 b of the lists is block b, entry 2 g + 1 is ghost g: a content that the shadow has and the pool has not,
    called *exposed*. A block that the pool has and the shadow has not is an *orphan*; orphans stand in a list of their
    own, in the order in which the shadow dropped them. 42 to 44 bytes a block. All operations are O(1) expected.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_exposed: i64 = 0
        self.num_orphans: i64 = 0
        #: Entries of the shadow, exposed ones included.
        self.length: i64 = 0
        self._next = zeros_i32(2 * num_blocks)
        self._prev = zeros_i32(2 * num_blocks)
        self._where = zeros_i32(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._ghost_key = zeros_i64(num_blocks)
        #: Ghosts by a hash of their key: the first of each bucket, the next after each. Free ones are chained too.
        self._bucket = zeros_i32(_num_buckets(num_blocks))
        self._chain = zeros_i32(num_blocks)
        self._free_ghost: i32 = 0
        self._num_ghosts_made: i64 = 0
        self.clear()

    def is_idle(self, block: i64) -> bool:
        """Whether `block`, any integer, is a block that is idle."""
        return 0 < block < len(self._where) and self._where[block] != NOWHERE

    def is_orphan(self, block: i64) -> bool:
        """Whether the pool has this idle block and the shadow has not."""
        return self._where[block] == ORPHAN

    def key(self, block: i64) -> i64:
        """The key with which `block` became idle last."""
        return self._key[block]

    def insert(self, block: i64, key: i64) -> None:
        """`block`, which is not idle, became idle: the shadow has it too, used last."""
        self._key[block] = key
        self._where[block] = IN_SHADOW
        self._link(2 * block, i64(self._prev[SHADOW]))
        self.length += 1

    def remove(self, block: i64) -> None:
        """The idle `block` is held again, or gone in the pool and in the shadow."""
        if self._where[block] == ORPHAN:
            self.num_orphans -= 1
        else:
            self.length -= 1
        self._where[block] = NOWHERE
        self._unlink(2 * block)

    def expose(self, block: i64) -> None:
        """The pool evicts `block`, which the shadow keeps, where it is."""
        ghost = self._new_ghost()
        self._put_in_bucket(ghost, self._key[block])
        before = i64(self._prev[2 * block])
        self._where[block] = NOWHERE
        self._unlink(2 * block)
        self._link(2 * ghost + 1, before)
        self.num_exposed += 1

    def ask(self, key: i64) -> bool:
        """Whether a content is exposed, and now no more: it is asked for. O(1) expected."""
        if self.num_exposed == 0:
            return False
        ghost = i64(self._bucket[self._bucket_of(key)])
        while ghost != 0 and self._ghost_key[ghost] != key:
            ghost = i64(self._chain[ghost])
        if ghost == 0:
            return False
        self._drop_ghost(ghost)
        return True

    def trim(self, length: i64) -> i64:
        """Drop what was used longest ago until `length` entries remain; how many of the dropped were exposed."""
        ended: i64 = 0
        while self.length > length:
            entry = i64(self._next[SHADOW])
            if entry & 1 == 1:
                self._drop_ghost(entry >> 1)
                ended += 1
            else:
                self._unlink(entry)
                self._link(entry, i64(self._prev[ORPHANS]))
                self._where[entry >> 1] = ORPHAN
                self.length -= 1
                self.num_orphans += 1
        return ended

    def oldest_orphan(self) -> i64:
        """The orphan that the shadow dropped first; there must be one."""
        return i64(self._next[ORPHANS]) >> 1

    def _link(self, entry: i64, before: i64) -> None:
        after = self._next[before]
        self._next[entry] = after
        self._prev[entry] = i32(before)
        self._prev[i64(after)] = i32(entry)
        self._next[before] = i32(entry)

    def _unlink(self, entry: i64) -> None:
        before = self._prev[entry]
        after = self._next[entry]
        self._next[i64(before)] = after
        self._prev[i64(after)] = before

    # Ghosts: as many as blocks, so there is always one free.

    def _new_ghost(self) -> i64:
        ghost = i64(self._free_ghost)
        if ghost == 0:
            self._num_ghosts_made += 1
            return self._num_ghosts_made
        self._free_ghost = self._chain[ghost]
        return ghost

    def _bucket_of(self, key: i64) -> i64:
        return mix(key) & (i64(len(self._bucket)) - 1)

    def _put_in_bucket(self, ghost: i64, key: i64) -> None:
        bucket = self._bucket_of(key)
        self._ghost_key[ghost] = key
        self._chain[ghost] = self._bucket[bucket]
        self._bucket[bucket] = i32(ghost)

    def _drop_ghost(self, ghost: i64) -> None:
        self._take_from_bucket(ghost)
        self._unlink(2 * ghost + 1)
        self._chain[ghost] = self._free_ghost
        self._free_ghost = i32(ghost)
        self.length -= 1
        self.num_exposed -= 1

    def _take_from_bucket(self, ghost: i64) -> None:
        bucket = self._bucket_of(self._ghost_key[ghost])
        other = i64(self._bucket[bucket])
        if other == ghost:
            self._bucket[bucket] = self._chain[ghost]
            return
        while self._chain[other] != ghost:
            other = i64(self._chain[other])
        self._chain[other] = self._chain[ghost]

    # The size, and checks.

    def clear(self) -> None:
        """Forget all. O(num_blocks)."""
        clear_i32(self._where)
        clear_i32(self._bucket)
        for end in range(2):
            self._next[end] = i32(end)
            self._prev[end] = i32(end)
        self._free_ghost = 0
        self._num_ghosts_made = 0
        self.num_exposed = 0
        self.num_orphans = 0
        self.length = 0

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. O(num_blocks)."""
        following = grown_i32(self._next, 2 * num_blocks)
        previous = grown_i32(self._prev, 2 * num_blocks)
        where = grown_i32(self._where, num_blocks)
        key = grown_i64(self._key, num_blocks)
        ghost_key = grown_i64(self._ghost_key, num_blocks)
        chain = grown_i32(self._chain, num_blocks)
        bucket = zeros_i32(_num_buckets(num_blocks))
        self._next = following
        self._prev = previous
        self._where = where
        self._key = key
        self._ghost_key = ghost_key
        self._chain = chain
        self._bucket = bucket
        for entry in self._entries(SHADOW):
            if entry & 1 == 1:
                self._put_in_bucket(i64(entry) >> 1, self._ghost_key[i64(entry) >> 1])

    def _entries(self, end: i64) -> list[int]:
        """The entries of a list, first to last."""
        found: list[int] = []
        entry = i64(self._next[end])
        while entry != end and len(found) < len(self._next):
            found.append(int(entry))
            entry = i64(self._next[entry])
        return found

    def idle_blocks(self) -> set[int]:
        """All idle blocks. O(num_blocks)."""
        return {block for block in range(len(self._where)) if self._where[i64(block)] != NOWHERE}

    def check(self) -> None:
        """Lists, counts and buckets agree. O(num_blocks). Raises `InvariantError`."""
        shadow = self._entries(SHADOW)
        orphans = self._entries(ORPHANS)
        ghosts = [entry >> 1 for entry in shadow if entry & 1 == 1]
        if len(shadow) != self.length or len(orphans) != self.num_orphans or len(ghosts) != self.num_exposed:
            raise InvariantError(
                f"guard: {len(shadow)} contents in the shadow, {len(ghosts)} exposed, {len(orphans)} orphans; counted "
                f"{self.length}, {self.num_exposed}, {self.num_orphans}"
            )
        self._check_places([entry >> 1 for entry in shadow if entry & 1 == 0], IN_SHADOW)
        self._check_places([entry >> 1 for entry in orphans], ORPHAN)
        if len(self.idle_blocks()) != len(shadow) - len(ghosts) + len(orphans):
            raise InvariantError("guard: a block says it is idle and is in no list")
        for ghost in ghosts:
            self._check_found(i64(ghost))

    def _check_places(self, blocks: list[int], where: i32) -> None:
        for block in blocks:
            if self._where[i64(block)] != where:
                raise InvariantError(f"guard: block {block} is in list {where} and says {self._where[i64(block)]}")

    def _check_found(self, ghost: i64) -> None:
        other = i64(self._bucket[self._bucket_of(self._ghost_key[ghost])])
        while other != 0 and other != ghost:
            other = i64(self._chain[other])
        if other == 0:
            raise InvariantError(f"guard: the exposed content {self._ghost_key[ghost]} is not found by its key")


def _num_buckets(num_blocks: int) -> int:
    """A power of two, between half and all of the blocks."""
    num_buckets = 1
    while 2 * num_buckets <= num_blocks:
        num_buckets *= 2
    return num_buckets
