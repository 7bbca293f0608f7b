"""The sequences of a step, and the source of the tokens that it computes."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...errors import StalePlan
from ..arrays import view_i64, zeros_i64
from ..index.prefix_index import PrefixIndex
from ..sequences.block_table import BlockTable
from ..sequences.table import NO_TOKEN, SequenceTable
from ..tokens import LOW_HALF

SCHEDULED: Final[i64] = 0
NO_BLOCKS: Final[i64] = 1
WAITS_FOR_PREFIX: Final[i64] = 2
HALF_BITS: Final[i64] = 32
#: Stands for a token that the cache does not know: a draft, or one that is still to be sampled.
UNKNOWN: Final[i64] = -1


class StepTokens:
    """Source of the tokens that a step computes."""

    def write(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64], ids: vec[i64]) -> None:
        """Write tokens `starts` to `starts + counts` of each row to the beginning of `ids`. O(tokens).

        `slots` has the slots of these tokens in the first group; it is empty if they are unknown.
        """
        raise NotImplementedError("step tokens must have write()")


class KnownTokens(StepTokens):
    """The tokens that a cache's sequences have now."""

    def __init__(self, sequences: SequenceTable, index: PrefixIndex, first_group: BlockTable) -> None:
        self.sequences = sequences
        self.index = index
        #: Tokens are packed two to a word, in the order of their slots: where token blocks hold keys and values.
        self._lie_by_slot = first_group is sequences and sequences.block_size & 1 == 0

    def write(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64], ids: vec[i64]) -> None:
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
    """Tokens that were sent with a plan, in its order."""

    def __init__(self, ids: vec[i64]) -> None:
        self.ids = ids

    def write(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64], ids: vec[i64]) -> None:
        for index in range(i64(len(self.ids))):
            ids[index] = self.ids[index]


class Batch:
    """The sequences of a step with their ranges of tokens, and the version of the cache at the time of the plan.

    `clock` is the table with the version. `rows`, `starts`, `scheduled` and `statuses` have one item per sequence.
    """

    def __init__(
        self,
        clock: BlockTable,
        tokens: StepTokens,
        rows: vec[i64],
        starts: vec[i64],
        scheduled: vec[i64],
        statuses: vec[i64],
    ) -> None:
        self.clock = clock
        self.version: i64 = clock.version
        self.tokens = tokens
        self.rows = rows
        self.starts = starts
        self.scheduled = scheduled
        self.statuses = statuses
        #: Number of the step, 0 if steps are not numbered.
        self.step: i64 = 0

    def num_tokens(self) -> i64:
        """Return T, the number of tokens that the step computes."""
        total: i64 = 0
        for count in self.scheduled:
            total += count
        return total

    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Return the number of tokens of each sequence after the step."""
        return (view_i64(self.starts) + view_i64(self.scheduled)).astype(np.int32)

    def input_ids(self, slots: vec[i64]) -> vec[i64]:
        """Return the tokens that the step computes, -1 if unknown."""
        self.require_fresh()
        ids = zeros_i64(int(self.num_tokens()))
        self.tokens.write(self.rows, self.starts, self.scheduled, slots, ids)
        self.require_fresh()
        return ids

    def positions(self) -> vec[i64]:
        """Return the position of each of these tokens in its sequence."""
        positions = zeros_i64(int(self.num_tokens()))
        self.write_positions(positions)
        return positions

    def write_positions(self, positions: vec[i64]) -> None:
        """Write the positions to the beginning of `positions`."""
        starts = self.starts
        scheduled = self.scheduled
        filled: i64 = 0
        for index in range(i64(len(starts))):
            position = starts[index]
            count = scheduled[index]
            if count == 1:
                positions[filled] = position
            else:
                for offset in range(count):
                    positions[filled + offset] = position + offset
            filled += count

    def require_fresh(self) -> None:
        """Raise `StalePlan` if the cache has changed since."""
        if self.clock.version != self.version:
            again = "reserve again" if self.step == 0 else f"commit(seqs, 0, step={self.step}) and reserve again"
            raise StalePlan(
                f"the cache has changed since this plan was made: by a later call, or by a free that waited for the "
                f"call that made it; {again}, but carry out its copies and swaps first: they can still be read"
            )
