"""The queue of free blocks, in eviction order."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import grown_i32, zeros_i32
from ..index.prefix_index import PrefixIndex

#: Links of neighbours that lie in one cache line.
BLOCKS_A_LINE: Final[i64] = 16


class FreeQueue:
    """A doubly linked list of free blocks in two arrays. The head is allocated, and so evicted, next.

    The null block is never free, so its two links are the ends of the list, and an empty queue is no special case.
    Removal from the middle is O(1), so that reviving a cached block is cheap (a deque would search for it). The order
    is least recently used: freed blocks are appended at the tail, but blocks that cache nothing at the head.

    Only this class writes `next_free` and `prev_free`. The methods do not check their arguments;
    `FreeKVCacheBlockQueue` does.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free: i64 = num_blocks - 1
        #: No block from the head to this one is cached; the null block if nothing is known. The ledger sets it; blocks
        #: that leave the queue update it here.
        self.last_empty: i64 = num_blocks - 1
        #: A lower bound of the number of blocks up to there: a removal decrements it without a check whether its block
        #: comes before. If it is too low, the ledger passes some blocks again.
        self.num_empty: i64 = num_blocks - 1
        self.next_free = zeros_i32(num_blocks)
        self.prev_free = zeros_i32(num_blocks)
        next_free = self.next_free
        prev_free = self.prev_free
        for block in range(1, i64(num_blocks)):
            next_free[block - 1] = i32(block)
            prev_free[block] = i32(block - 1)
        prev_free[NULL_BLOCK] = i32(num_blocks - 1)

    def append(self, block: i64) -> None:
        """Make `block` the last to be allocated. O(1)."""
        self._link(block, i64(self.prev_free[NULL_BLOCK]), NULL_BLOCK)

    def append_run(self, blocks: vec[i64], count: i64) -> None:
        """Make `blocks[:count]` the last to be allocated, in this order. O(count)."""
        next_free = self.next_free
        prev_free = self.prev_free
        before = i64(prev_free[NULL_BLOCK])
        for index in range(count):
            block = blocks[index]
            next_free[before] = i32(block)
            prev_free[block] = i32(before)
            before = block
        next_free[before] = i32(NULL_BLOCK)
        prev_free[NULL_BLOCK] = i32(before)
        self.num_free += count

    def append_released(self, ref_cnt: vec[i32], blocks: vec[i32], first: i64, last: i64) -> None:
        """Release `blocks[first:last]` from last to first, and append those that became free.

        O(blocks), in one pass that reads only counts and links.
        """
        next_free = self.next_free
        prev_free = self.prev_free
        self._load_lines(ref_cnt, blocks, first, last)
        before = i64(prev_free[NULL_BLOCK])
        count: i64 = 0
        position = last - 1
        while position >= first:
            block = i64(blocks[position])
            references = ref_cnt[block] - 1
            ref_cnt[block] = references
            if references == 0:
                next_free[before] = i32(block)
                prev_free[block] = i32(before)
                before = block
                count += 1
            position -= 1
        next_free[before] = i32(NULL_BLOCK)
        prev_free[NULL_BLOCK] = i32(before)
        self.num_free += count

    def _load_lines(self, ref_cnt: vec[i32], blocks: vec[i32], first: i64, last: i64) -> i64:
        """Read counts and links of some blocks, one per cache line if the ids are consecutive, to prefetch them.

        The returned sum keeps the compiler from dropping the loop.
        """
        next_free = self.next_free
        prev_free = self.prev_free
        total: i64 = 0
        for position in range(first, last, BLOCKS_A_LINE):
            block = i64(blocks[position])
            total ^= i64(ref_cnt[block] ^ next_free[block] ^ prev_free[block])
        return total

    def append_left(self, block: i64) -> None:
        """Make `block`, which caches nothing, the next to be allocated. O(1)."""
        if self.last_empty == NULL_BLOCK:
            self.last_empty = block
            self.num_empty = 0
        self.num_empty += 1
        self._link(block, NULL_BLOCK, i64(self.next_free[NULL_BLOCK]))

    def remove(self, block: i64) -> None:
        """Remove `block`, wherever it is in the queue. O(1)."""
        before = self.prev_free[block]
        after = self.next_free[block]
        self.num_empty -= 1
        if block == self.last_empty:
            self.last_empty = i64(before)
        self.next_free[i64(before)] = after
        self.prev_free[i64(after)] = before
        self.num_free -= 1

    def remove_shared(self, ref_cnt: vec[i32], blocks: vec[i32], first: i64, last: i64) -> None:
        """Add a holder to each of `blocks[first:last]`, and remove those that were free from the queue. O(blocks)."""
        next_free = self.next_free
        prev_free = self.prev_free
        last_empty = self.last_empty
        count: i64 = 0
        for position in range(first, last):
            block = i64(blocks[position])
            references = ref_cnt[block]
            ref_cnt[block] = references + 1
            if references == 0:
                before = prev_free[block]
                after = next_free[block]
                if block == last_empty:
                    last_empty = i64(before)
                next_free[i64(before)] = after
                prev_free[i64(after)] = before
                count += 1
        self.last_empty = last_empty
        self.num_empty -= count
        self.num_free -= count

    def remove_chain(self, first: i32, last: i32, count: i64) -> None:
        """Remove `count` cached blocks that are consecutive in the queue, from `first` to `last`. O(1)."""
        before = self.prev_free[i64(first)]
        after = self.next_free[i64(last)]
        self.next_free[i64(before)] = after
        self.prev_free[i64(after)] = before
        self.num_free -= count

    def append_chain(self, first: i32, last: i32, count: i64) -> None:
        """Append a chain that `remove_chain` removed. O(1)."""
        before = self.prev_free[NULL_BLOCK]
        self.next_free[i64(before)] = first
        self.prev_free[i64(first)] = before
        self.next_free[i64(last)] = i32(NULL_BLOCK)
        self.prev_free[NULL_BLOCK] = last
        self.num_free += count

    def put_back(self, block: i64) -> None:
        """Undo the latest `remove` that is not undone yet. `block` still has its old links (Knuth's dancing links)."""
        self.next_free[i64(self.prev_free[block])] = i32(block)
        self.prev_free[i64(self.next_free[block])] = i32(block)
        self.num_free += 1

    def popleft_n(self, out: vec[i32], start: i64, count: i64) -> None:
        """Move the first `count` blocks, which must exist, to `out[start:]`. O(count)."""
        next_free = self.next_free
        self.num_empty -= count
        if self.num_empty <= 0:
            self.last_empty = NULL_BLOCK
        block = i64(next_free[NULL_BLOCK])
        for index in range(start, start + count):
            out[index] = i32(block)
            block = i64(next_free[block])
        next_free[NULL_BLOCK] = i32(block)
        self.prev_free[block] = 0
        self.num_free -= count

    def make_room_for(self, num_blocks: int) -> "QueueRoom":
        """Return links for blocks up to `num_blocks - 1`; none of the new ones is free yet. O(num_blocks)."""
        return QueueRoom(grown_i32(self.next_free, num_blocks), grown_i32(self.prev_free, num_blocks))

    def move_into(self, room: "QueueRoom") -> None:
        self.next_free = room.next_free
        self.prev_free = room.prev_free

    def block_ids(self) -> list[int]:
        """Return all free blocks, in eviction order. O(free)."""
        ids: list[int] = []
        block = i64(self.next_free[NULL_BLOCK])
        while block != NULL_BLOCK and len(ids) <= len(self.next_free):
            ids.append(int(block))
            if not 0 < block < len(self.next_free):
                raise InvariantError(
                    f"free queue: a link leads to block {block}; the pool has {len(self.next_free)} blocks"
                )
            block = i64(self.next_free[block])
        return ids

    def check(self) -> None:
        """Raise `InvariantError` unless both directions of the list agree with each other and with the count.

        O(free).
        """
        ids = self.block_ids()
        if len(ids) != self.num_free:
            raise InvariantError(f"free queue: {len(ids)} blocks are linked, but num_free is {self.num_free}")
        before: i64 = NULL_BLOCK
        for block in ids:
            if i64(self.prev_free[block]) != before:
                raise InvariantError(
                    f"free queue: block {block} has the predecessor {self.prev_free[block]}; it must be {before}"
                )
            before = block
        if self.last_empty != NULL_BLOCK and self.last_empty not in ids[max(int(self.num_empty) - 1, 0) :]:
            raise InvariantError(
                f"free queue: last_empty is block {self.last_empty}, which comes before position {self.num_empty}"
            )
        if i64(self.prev_free[NULL_BLOCK]) != before:
            raise InvariantError(
                f"free queue: the tail is {self.prev_free[NULL_BLOCK]}, but the last block is {before}"
            )

    def knows_empty(self, count: i64) -> bool:
        """Return whether at least `count` blocks at the head are known to cache nothing. O(1)."""
        return self.last_empty != NULL_BLOCK and self.num_empty >= count

    def num_empty_first(self, index: PrefixIndex, most: i64) -> i64:
        """Return how many blocks at the head cache nothing, up to `most`. O(1) if so many are known, else O(most)."""
        if self.knows_empty(most):
            return most
        identity = index.identity
        count: i64 = 0
        last: i64 = NULL_BLOCK
        block = i64(self.next_free[NULL_BLOCK])
        while count < most and block != NULL_BLOCK and identity[2 * block] == NO_CONTENT:
            count += 1
            last = block
            block = i64(self.next_free[block])
        self.last_empty = last
        self.num_empty = count
        return count

    def check_empty(self, index: PrefixIndex) -> None:
        """Check that the blocks up to `last_empty` cache nothing. O(free)."""
        block = i64(self.last_empty)
        while block != NULL_BLOCK:
            if index.is_cached(block):
                raise InvariantError(
                    f"free queue: block {block} is cached, but blocks up to {self.last_empty} must not be"
                )
            block = i64(self.prev_free[block])

    def _link(self, block: i64, before: i64, after: i64) -> None:
        self.prev_free[block] = i32(before)
        self.next_free[block] = i32(after)
        self.next_free[before] = i32(block)
        self.prev_free[after] = i32(block)
        self.num_free += 1


class QueueRoom:
    """Larger arrays for a queue, not installed yet."""

    def __init__(self, next_free: vec[i32], prev_free: vec[i32]) -> None:
        self.next_free = next_free
        self.prev_free = prev_free
