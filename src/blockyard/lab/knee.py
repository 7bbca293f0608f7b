"""Where a curve bends: more blocks pay until here."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def find_knee(sizes: NDArray[np.float64], hit_rates: NDArray[np.float64]) -> int:
    """The index of the point farthest above the line from the first point to the last.

    sizes, hit_rates: (S,), sizes ascending, S at least 1. Both axes are scaled to 0 to 1, sizes not by their logarithm:
    a block costs the same anywhere (Kneedle: Satopää et al., ICDCS workshops 2011). A curve that never rises has its
    knee at its first point. O(S).
    """
    rise, run = hit_rates[-1] - hit_rates[0], sizes[-1] - sizes[0]
    if rise <= 0 or run <= 0:
        return 0
    return int(np.argmax((hit_rates - hit_rates[0]) / rise - (sizes - sizes[0]) / run))
