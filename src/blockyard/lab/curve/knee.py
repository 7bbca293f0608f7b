"""Where a curve bends: more blocks pay until here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Knee:
    """policy: whose curve it is of. blocks, hit_rate: the point."""

    policy: str
    blocks: int
    hit_rate: float


def find_knee(sizes: NDArray[np.float64], hit_rates: NDArray[np.float64], working_set: float, infinite: float) -> int:
    """The index of the point farthest above the line from no cache at all to a cache of everything.

    sizes, hit_rates: (S,), S at least 1. working_set: blocks of everything; infinite: the hit rate with them, the end
    of the line. Both axes are scaled to 0 to 1, sizes not
    by their logarithm: a block costs the same anywhere (Kneedle: Satopää et al., ICDCS workshops 2011). A trace without
    hits has its knee at the first size. O(S).
    """
    if infinite <= 0:
        return 0
    return int(np.argmax(hit_rates / infinite - sizes / working_set))
