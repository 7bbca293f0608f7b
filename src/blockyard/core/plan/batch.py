"""The sequences of a step, as a plan remembers them."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...errors import StalePlan
from ..arrays import view_i64, zeros_i64
from ..sequences.block_table import BlockTable
from .step_tokens import StepTokens

SCHEDULED: Final[i64] = 0
NO_BLOCKS: Final[i64] = 1
WAITS_FOR_PREFIX: Final[i64] = 2


class Batch:
    """Who computes how many tokens from where on, and the version of the cache in which that was decided.

    clock: the table whose version tells. rows, starts, scheduled, statuses: one item for each sequence.
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
        #: The number of the step, 0 where steps have none.
        self.step: i64 = 0

    def num_tokens(self) -> i64:
        """T, the tokens that the step computes."""
        total: i64 = 0
        for count in self.scheduled:
            total += count
        return total

    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence after the step."""
        return (view_i64(self.starts) + view_i64(self.scheduled)).astype(np.int32)

    def input_ids(self, slots: vec[i64]) -> vec[i64]:
        """The tokens that the step computes, -1 for those that are not known; see `StepTokens.write`."""
        self.require_fresh()
        ids = zeros_i64(int(self.num_tokens()))
        self.tokens.write(self.rows, self.starts, self.scheduled, slots, ids)
        self.require_fresh()
        return ids

    def positions(self) -> vec[i64]:
        """The place of each of these tokens in its sequence."""
        positions = zeros_i64(int(self.num_tokens()))
        self.write_positions(positions)
        return positions

    def write_positions(self, positions: vec[i64]) -> None:
        """Write them to the beginning of `positions`."""
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
        """Raise `StalePlan` once the cache has changed."""
        if self.clock.version != self.version:
            again = "reserve again" if self.step == 0 else f"commit(seqs, 0, step={self.step}) and reserve again"
            raise StalePlan(
                f"the cache has changed since this plan was made: by a later call, or by a free that waited for the "
                f"call that made it; {again}, but carry out its copies and swaps first: they can still be read"
            )
