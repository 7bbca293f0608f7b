"""Where the tokens come from that a step computes."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ..index.prefix_index import PrefixIndex
from ..sequences.block_table import BlockTable
from ..sequences.table import NO_TOKEN, SequenceTable
from ..tokens import LOW_HALF

HALF_BITS: Final[i64] = 32
#: Stands for a token that the cache does not know: a draft, or one that is still to be sampled.
UNKNOWN: Final[i64] = -1


class StepTokens:
    """What a plan asks for the tokens of its batch."""

    def write(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64], ids: vec[i64]) -> None:
        """Write tokens `starts` to `starts + counts` of each row to the beginning of `ids`. O(tokens).

        slots: where their keys and values go in the first group, or none if that is not known yet.
        """
        raise NotImplementedError("step tokens must have write()")


class KnownTokens(StepTokens):
    """The tokens that the sequences of a cache hold, as they are now."""

    def __init__(self, sequences: SequenceTable, index: PrefixIndex, first_group: BlockTable) -> None:
        self.sequences = sequences
        self.index = index
        #: Tokens are packed two to a word, in the order of their slots: where token blocks hold keys and values.
        self._lie_by_slot = first_group is sequences and sequences.block_size & 1 == 0

    def write(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64], ids: vec[i64]) -> None:
        """A decoded token by its slot, where that tells its place; else a run of tokens, block by block."""
        num_tokens = self.sequences.num_tokens
        words = self.index.rows.words
        first_word = self.index.rows.first_word
        by_slot = self._lie_by_slot and len(slots) > 0
        filled: i64 = 0
        for index in range(i64(len(rows))):
            row = rows[index]
            start = starts[index]
            count = counts[index]
            if by_slot and count == 1 and start < num_tokens[row]:
                # What has a slot waits for its block no more.
                slot = slots[filled]
                word = words[first_word + (slot >> 1)]
                ids[filled] = word >> ((slot & 1) * HALF_BITS) & LOW_HALF
            elif count > 0:
                self._write_run(row, start, start + count, ids, filled)
            filled += count

    def _write_run(self, row: i64, position: i64, end: i64, ids: vec[i64], filled: i64) -> None:
        sequences = self.sequences
        known = sequences.num_tokens[row]
        pending = sequences.pending_token[row]
        placed = known if pending == NO_TOKEN else known - 1
        while position < min(end, placed):
            logical = position // sequences.block_size
            stop = min(end, placed, (logical + 1) * sequences.block_size)
            self._write_block(row, logical, position, stop, ids, filled)
            filled += stop - position
            position = stop
        while position < end:
            ids[filled] = pending if position < known else UNKNOWN
            filled += 1
            position += 1

    def _write_block(self, row: i64, logical: i64, position: i64, stop: i64, ids: vec[i64], filled: i64) -> None:
        words = self.index.rows.words
        first = self.index.rows.start_of(self.sequences.block_at(row, logical))
        offset = position - logical * self.sequences.block_size
        for place in range(stop - position):
            word = words[first + ((offset + place) >> 1)]
            ids[filled + place] = word >> ((offset + place & 1) * HALF_BITS) & LOW_HALF


class GivenTokens(StepTokens):
    """The tokens that came with a plan, in its own order."""

    def __init__(self, ids: vec[i64]) -> None:
        self.ids = ids

    def write(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64], ids: vec[i64]) -> None:
        """Copy them."""
        for index in range(i64(len(self.ids))):
            ids[index] = self.ids[index]
