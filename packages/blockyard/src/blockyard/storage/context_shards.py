"""Context parallel: which tokens of a sequence a rank keeps, and in which of its own slots.

Token i is on rank (i // interleave) % size. A block of the manager holds `size` times the tokens of a block of the
ranks' tensors, under the same id on each of them. vLLM's decode context parallel lays tokens out so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arguments import require_int
from ..groups import MAX_GROUP_BLOCK_SIZE

#: A one-dimensional array of 64-bit integers.
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The tokens of rank `rank` of `size`. Raises `InvalidArgument` for values outside their limits."""

    rank: int
    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        require_int("size", self.size, 1, MAX_GROUP_BLOCK_SIZE)
        require_int("rank", self.rank, 0, self.size - 1)
        require_int("interleave", self.interleave, 1, MAX_GROUP_BLOCK_SIZE)

    def is_own(self, slots: IntArray) -> NDArray[np.bool_]:
        """Return which tokens are kept here, by their positions or the manager's slots: both say the same. O(slots)."""
        own: NDArray[np.bool_] = slots // self.interleave % self.size == self.rank
        return own

    def local_slots(self, slots: IntArray) -> IntArray:
        """This rank's slots of tokens that it keeps, from the manager's; likewise places among a sequence's. O(slots).

        Blocks begin on rank 0, so a block's tokens here are as many in each block: no division by the block size.
        """
        rounds = slots // (self.interleave * self.size)
        local: IntArray = rounds * self.interleave + slots % self.interleave
        return local

    def num_local(self, num_tokens: IntArray) -> IntArray:
        """Return how many of the first num_tokens tokens of each sequence are kept here. O(sequences)."""
        rounds, rest = np.divmod(num_tokens, self.size * self.interleave)
        local: IntArray = rounds * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        return local

    def positions(self, num_local: int) -> IntArray:
        """Return where in their sequence the first num_local tokens that are kept here stand. O(num_local)."""
        places = np.arange(num_local)
        rounds, rest = np.divmod(places, self.interleave)
        found: IntArray = (rounds * self.size + self.rank) * self.interleave + rest
        return found
