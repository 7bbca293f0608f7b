"""Calls on blocks that the caller names by id: uncache, adopt, evict, and release in the given order."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvalidArgument, OutOfBlocks
from ..arrays import grown_i64, zeros_i32, zeros_i64
from .ledger import BlockLedger


def require_ids(blocks: vec[i64], num_blocks: int) -> None:
    """Raise `InvalidArgument` for a number that is not a block of the pool."""
    for place in range(i64(len(blocks))):
        if not 1 <= blocks[place] < num_blocks:
            raise InvalidArgument(f"block_ids[{place}] is {blocks[place]}; it must be from 1 to {num_blocks - 1}")


def require_free(ledger: BlockLedger, blocks: vec[i64], may_evict: bool) -> vec[i32]:
    """Check that the blocks are free, and return their ids as an int32 vec. O(blocks).

    Raises `InvalidArgument` for a block that is held or given twice and, unless `may_evict`, for a cached one.
    """
    taken = zeros_i32(len(blocks))
    seen: set[int] = set()
    for place in range(i64(len(blocks))):
        block = blocks[place]
        if ledger.ref_cnt[block] > 0:
            raise InvalidArgument(
                f"block_ids[{place}] is {block}, which is held {ledger.ref_cnt[block]} times; it must be free"
            )
        if not may_evict and ledger.index.is_cached(block):
            raise InvalidArgument(
                f"block_ids[{place}] is {block}, which is cached; with may_evict=False it must not be"
            )
        if int(block) in seen:
            raise InvalidArgument(f"block_ids[{place}] is {block}, which is given twice; give each block once")
        seen.add(int(block))
        taken[place] = i32(block)
    return taken


def uncache(ledger: BlockLedger, blocks: vec[i64]) -> int:
    """Uncache blocks whose ids are checked. The first of the idle ones is allocated next.

    Return how many were cached.
    """
    count = 0
    place = i64(len(blocks)) - 1
    while place >= 0:
        block = blocks[place]
        if ledger.index.is_cached(block):
            count += 1
            ledger.uncache(block)
        place -= 1
    return count


def evict_idle(ledger: BlockLedger, count: int) -> list[int]:
    """Evict the first `count` idle blocks and make them the next to be allocated. Return their ids."""
    victims = ledger.idle_in_order(count)
    if len(victims) < count:
        raise OutOfBlocks(f"num_blocks is {count}; only {len(victims)} blocks are cached and idle", count, len(victims))
    for victim in victims:
        ledger.evict(i64(victim))
    for victim in reversed(victims):
        ledger.move_to_front(i64(victim))
    return victims


#: Greater than every position in a call's ids.
MARK_STEP: Final[i64] = 134217728


class ReleaseOrder:
    """Reorders ids so that `BlockLedger.release`, which starts at the last one, has the effect of the caller's order.

    Each uncached block is put at the head of the queue, before those already there. If an id is given several times,
    its last position may free the block; the other references are released before all others.
    """

    def __init__(self, num_blocks: int) -> None:
        #: Of the latest call with each id: its number times MARK_STEP, plus the last position of the id.
        self._marks = zeros_i64(num_blocks)
        self._num_marks: i64 = 0

    def make_room(self, num_blocks: int) -> None:
        self._marks = grown_i64(self._marks, num_blocks)

    def of(self, ledger: BlockLedger, blocks: vec[i32]) -> vec[i32]:
        """Return the ids in the order for `release`: uncached ones, cached ones reversed, then repeated ones.

        O(ids).
        """
        count = i64(len(blocks))
        self._num_marks += 1
        stamp = self._num_marks * MARK_STEP
        different = self._mark_last_places(blocks, stamp)
        ordered = zeros_i32(int(count))
        first: i64 = 0
        last = different
        repeated = different
        for position in range(count):
            block = i64(blocks[position])
            if self._marks[block] != stamp + position:
                ordered[repeated] = blocks[position]
                repeated += 1
            elif ledger.index.is_cached(block):
                last -= 1
                ordered[last] = blocks[position]
            else:
                ordered[first] = blocks[position]
                first += 1
        return ordered

    def _mark_last_places(self, blocks: vec[i32], stamp: i64) -> i64:
        """Mark the last position of each id; return the number of different ids."""
        different: i64 = 0
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if self._marks[block] < stamp:
                different += 1
            self._marks[block] = stamp + position
        return different
