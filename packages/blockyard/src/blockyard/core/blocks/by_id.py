"""Blocks that a caller names by their ids, or asks for: uncached, adopted, evicted, and released in the order given."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvalidArgument, OutOfBlocks
from ..arrays import grown_i64, zeros_i32, zeros_i64
from .ledger import BlockLedger


def require_ids(blocks: vec[i64], num_blocks: int) -> None:
    """Raises `InvalidArgument` for a number that is no block of the pool's."""
    for place in range(i64(len(blocks))):
        if not 1 <= blocks[place] < num_blocks:
            raise InvalidArgument(f"block_ids[{place}] is {blocks[place]}; it must be from 1 to {num_blocks - 1}")


def require_free(ledger: BlockLedger, blocks: vec[i64], may_evict: bool) -> vec[i32]:
    """Return the ids as a lease has them. O(blocks).

    Raises `InvalidArgument` for one that is held or stands there twice, and unless it may be evicted for a cached one.
    """
    taken = zeros_i32(len(blocks))
    seen: set[int] = set()
    for place in range(i64(len(blocks))):
        block = blocks[place]
        if ledger.ref_cnt[block] > 0:
            raise InvalidArgument(f"block_ids[{place}] is {block}, which is held {ledger.ref_cnt[block]} times")
        if not may_evict and ledger.index.is_cached(block):
            raise InvalidArgument(f"block_ids[{place}] is {block}, which is cached; may_evict is False")
        if int(block) in seen:
            raise InvalidArgument(f"block_ids[{place}] is {block}, which stands there twice")
        seen.add(int(block))
        taken[place] = i32(block)
    return taken


def uncache(ledger: BlockLedger, blocks: vec[i64]) -> int:
    """See `BlockPool.uncache`; the ids are checked. Of idle ones the first is the next to be taken then."""
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
    """See `BlockPool.evict`."""
    victims = ledger.idle_in_order(count)
    if len(victims) < count:
        raise OutOfBlocks(f"num_blocks is {count}; fewer blocks are cached and idle", count, 0)
    for victim in victims:
        ledger.evict(i64(victim))
    for victim in reversed(victims):
        ledger.move_to_front(i64(victim))
    return victims


#: Above every place in a call's ids.
MARK_STEP: Final[i64] = 134217728


class ReleaseOrder:
    """The ledger releases from the last to the first, and puts each uncached block before those already there.

    Of an id that is given several times, the last one may free the block: the others are released before all.
    """

    def __init__(self, num_blocks: int) -> None:
        #: Where the latest call gave each id last: the call's number times MARK_STEP, plus the place.
        self._marks = zeros_i64(num_blocks)
        self._num_marks: i64 = 0

    def make_room(self, num_blocks: int) -> None:
        """Know ids up to `num_blocks - 1`."""
        self._marks = grown_i64(self._marks, num_blocks)

    def of(self, ledger: BlockLedger, blocks: vec[i32]) -> vec[i32]:
        """The same ids as the ledger is to have them: uncached ones, cached ones backwards, repeated ones. O(ids)."""
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
        """Mark where each id is given for the last time; how many ids there are."""
        different: i64 = 0
        for position in range(i64(len(blocks))):
            block = i64(blocks[position])
            if self._marks[block] < stamp:
                different += 1
            self._marks[block] = stamp + position
        return different
