"""Context parallelism: the tokens of a sequence that a rank keeps, and their slots on it.

Token i is on rank (i // interleave) % size. A block of the manager has `size` times the tokens of a block in a rank's
tensors, under the same id. This is the layout of vLLM's decode context parallelism.
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
        """Return which tokens this rank keeps, given their positions or the manager's slots. O(slots)."""
        own: NDArray[np.bool_] = slots // self.interleave % self.size == self.rank
        return own

    def local_slots(self, slots: IntArray) -> IntArray:
        """Return this rank's slots of its tokens, given the manager's slots; or likewise local positions. O(slots).

        Every block begins on rank 0, so the block size is not needed.
        """
        rounds = slots // (self.interleave * self.size)
        local: IntArray = rounds * self.interleave + slots % self.interleave
        return local

    def num_local(self, num_tokens: IntArray) -> IntArray:
        """Return how many of each sequence's first num_tokens tokens this rank keeps. O(sequences)."""
        rounds, rest = np.divmod(num_tokens, self.size * self.interleave)
        local: IntArray = rounds * self.interleave + np.clip(rest - self.rank * self.interleave, 0, self.interleave)
        return local

    def positions(self, num_local: int) -> IntArray:
        """Return the positions in the sequence of this rank's first num_local tokens. O(num_local)."""
        places = np.arange(num_local)
        rounds, rest = np.divmod(places, self.interleave)
        found: IntArray = (rounds * self.size + self.rank) * self.interleave + rest
        return found
