"""Texts that many prompts begin with, and the ids of the blocks that such a text fills.

A block that a shared text fills alone has one id forever. The block in which it ends also holds what follows, so that
one is new in each prompt. This is what makes equal ids mean equal prefixes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..fields import read_only
from .draws import lognormal


class SharedTexts:
    """`count` texts of fixed lengths. 16 bytes each; the ids are made when asked for.

    tokens: (count,) their lengths. num_ids: how many ids they take, from 0.
    """

    def __init__(
        self, rng: np.random.Generator, count: int, median: float, spread: float, longest: int, block_size: int
    ) -> None:
        self.tokens: list[int] = lognormal(rng, median, spread, longest, count).tolist()
        ends = np.cumsum([length // block_size for length in self.tokens])
        self.num_ids = int(ends[-1])
        self._starts: list[int] = [0, *ends.tolist()]

    def ids(self, text: int) -> NDArray[np.int64]:
        """The ids of the blocks that the text fills, in order."""
        return np.arange(self._starts[text], self._starts[text + 1])


def continued(prefix: NDArray[np.int64], num_tokens: int, block_size: int, next_id: int) -> NDArray[np.int64]:
    """The ids of a prompt of num_tokens that begins with the full blocks `prefix`; the others are new, from next_id."""
    missing = -(-num_tokens // block_size) - len(prefix)
    return read_only(np.concatenate((prefix, np.arange(next_id, next_id + missing))))
