"""In-flight prefix sharing: sequences share blocks that are still being computed.

The full blocks of a prompt are indexed as soon as it is allocated, marked with their owner: the row of the sequence
that will compute them (the producer). A request with the same prompt shares these blocks instead of computing them
again. It waits, and gets slots when the producer has computed the shared blocks, or computes them in the same step:
there, each layer writes before it reads (I3).

From the first uncomputed block to the last shared one, a waiter's blocks are exactly the producer's, so the number of
tokens that the producer has computed decides. A hit with other blocks (of several producers, or computed blocks after
uncomputed ones) is cut.

If a producer is freed before it is done, the waiter that shares most of its blocks takes over.
"""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NO_ROW
from ..blocks.ledger import BlockLedger
from ..index.prompt import Hit
from .table import SequenceTable


class Joins:
    """Waiters and producers: `waits_on`, `waits_for`, `waits_from`, `num_waiters`, and the owners of blocks.

    If a waiter takes over, it may restart from an earlier token, and the reservations of all waiters end.
    """

    def __init__(self, sequences: SequenceTable, token_blocks: BlockLedger) -> None:
        self.sequences = sequences
        self.token_blocks = token_blocks
        self.index = token_blocks.index
        self.block_size: i64 = token_blocks.block_size

    def limit(self, hit: Hit, ref_cnt: vec[i32]) -> None:
        """Cut a hit to the blocks that can be shared: the computed ones, and then those of one producer.

        Idle blocks are always computed. O(found), and O(found) again per producer among them.
        """
        if self.index.num_pending == 0:
            return
        found = i64(len(hit.blocks))
        blocks = hit.blocks
        owner = self.index.owner
        first: i64 = 0
        while first < found and (ref_cnt[i64(blocks[first])] == 0 or owner[i64(blocks[first])] == 0):
            first += 1
        last = first
        while last < found and owner[i64(blocks[last])] != 0:
            last += 1
        while last > first:
            same = self._count_same(hit, i64(owner[i64(blocks[last - 1])]) - 1, first, last)
            if same == last:
                break
            last = same
        hit.first_pending = first
        hit.num_usable = last

    def _count_same(self, hit: Hit, row: i64, first: i64, last: i64) -> i64:
        """Return the first position from `first` on where the hit has another block than `row`; `last` if none has."""
        for position in range(first, last):
            if self.sequences.block_at(row, position) != i64(hit.blocks[position]):
                return position
        return last

    def join(self, row: i64, hit: Hit) -> None:
        """Make `row`, which takes a hit, wait for the producer of the hit's last block if that is not computed."""
        if hit.num_usable == 0:
            return
        owner = i64(self.index.owner[i64(hit.blocks[hit.num_usable - 1])]) - 1
        if owner != NO_ROW:
            self.sequences.waits_from[row] = hit.first_pending * self.block_size
            self._wait(row, owner, hit.num_usable * self.block_size)

    def _wait(self, row: i64, owner: i64, num_tokens: i64) -> None:
        sequences = self.sequences
        sequences.waits_on[row] = owner
        sequences.waits_for[row] = num_tokens
        sequences.num_waiters[owner] += 1
        sequences.ready[owner] = 0
        sequences.raise_alert(row)

    def settle(self, row: i64) -> None:
        """Stop waiting."""
        owner = self.sequences.waits_on[row]
        if owner != NO_ROW:
            self.sequences.num_waiters[owner] -= 1
            self.sequences.waits_on[row] = NO_ROW

    def leave(self, row: i64) -> None:
        """Give a sequence's uncomputed blocks to a waiter, or remove them from the index, before the sequence ends.

        O(its uncomputed blocks), and O(max_num_seqs) if others wait for it.
        """
        heir = self.settle_waiters(row)
        first: i64 = 0
        last: i64 = 0
        if heir != NO_ROW:
            last = self.sequences.waits_for[heir] // self.block_size
            self._succeed(row, heir)
            first = self.sequences.num_computed[heir] // self.block_size
        self._pass_on_blocks(row, heir, first, last)
        self.settle(row)

    def settle_waiters(self, row: i64) -> i64:
        """End the waits for `row` that are satisfied.

        Of the other waiters return the one that shares most blocks, or NO_ROW.

        Among equals it is the lowest row.
        """
        if self.sequences.num_waiters[row] == 0:
            return NO_ROW
        sequences = self.sequences
        heir: i64 = NO_ROW
        for other in range(sequences.max_num_seqs):
            if sequences.handle[other] == 0 or sequences.waits_on[other] != row:
                continue
            if not sequences.is_waiting(other):
                self.settle(other)
            elif heir == NO_ROW or sequences.waits_for[other] > sequences.waits_for[heir]:
                heir = other
        return heir

    def _succeed(self, row: i64, heir: i64) -> None:
        """Make `heir` continue the work of `row`, and all others wait for `heir`. Their reservations end."""
        sequences = self.sequences
        for other in range(sequences.max_num_seqs):
            if sequences.handle[other] != 0 and sequences.waits_on[other] == row:
                self.settle(other)
                self._end_reservations(other, sequences.handle[row])
                if other != heir:
                    self._wait(other, heir, sequences.waits_for[other])
        if sequences.is_waiting(row):
            self._wait(heir, sequences.waits_on[row], sequences.waits_for[row])
        computed = sequences.num_computed[row] // self.block_size * self.block_size
        computed = max(computed, sequences.waits_from[heir])
        sequences.num_computed[heir] = min(sequences.num_computed[heir], computed)

    def _end_reservations(self, row: i64, freed: i64) -> None:
        """End the reservations of a row that waited for the freed sequence, and of the row's waiters."""
        sequences = self.sequences
        sequences.end_with(row, freed)
        if sequences.num_waiters[row] == 0:
            return
        for other in range(sequences.max_num_seqs):
            if sequences.handle[other] != 0 and sequences.waits_on[other] == row and sequences.is_waiting(other):
                self._end_reservations(other, freed)

    def _pass_on_blocks(self, row: i64, heir: i64, heir_first: i64, heir_last: i64) -> None:
        """Make the heir the producer of its part of `row`'s uncomputed blocks, and remove the rest from the index."""
        sequences = self.sequences
        first = sequences.num_computed[row] // self.block_size
        for position in range(first, sequences.num_published[row]):
            block = sequences.block_at(row, position)
            if i64(self.index.owner[block]) != row + 1:
                continue
            if heir_first <= position < heir_last:
                self.index.owner[block] = i32(heir + 1)
            else:
                self.token_blocks.uncache(block)
