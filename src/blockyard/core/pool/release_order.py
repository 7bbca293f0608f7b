"""In which order ids are released, so that they are evicted in the order in which a caller gives them."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import grown_i64, zeros_i32, zeros_i64
from .ledger import BlockLedger

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
