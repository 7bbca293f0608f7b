"""What may be claimed for a policy: its distance from least recently used over many sizes, the worst one first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..policy_names import OPTIMUM
from .hit_rates import HitCurves
from .words import above_lru

#: Fewer sizes hide where a policy loses.
ENOUGH_SIZES = 100
#: Differences smaller than this, in points, are none.
SAME_POINTS = 0.005
#: The share of LRU's gap to the optimum says something where that gap is above so many points.
GAP_POINTS = 5.0
#: "A fifth or more" of the gap.
FIFTH = 0.2


@dataclass(frozen=True, slots=True)
class Claim:
    """Of one policy over all sizes. worst, median, mean, best: points of block hit rate above LRU. below: share of
    the sizes at which it is lower. gap_closed: mean share of LRU's gap to the optimum, over the sizes where that is
    above 5 points; fifth: share of these sizes at which it is 0.2 or more; gap_sizes: how many they are. Both are nan
    where there are none, or no optimum was run.
    """

    worst: float
    median: float
    mean: float
    best: float
    below: float
    gap_closed: float
    fifth: float
    gap_sizes: int


def claims_of(curves: HitCurves) -> dict[str, Claim]:
    """A claim for each policy besides LRU and the optimum; none where LRU was not run. O(policies * sizes)."""
    gap = np.zeros(len(curves.sizes))
    if OPTIMUM in curves.hit_rates and "lru" in curves.hit_rates:
        gap = 100 * (curves.hit_rates[OPTIMUM] - curves.hit_rates["lru"])
    has_gap = gap > GAP_POINTS
    claims = {}
    for policy, points in above_lru(curves).items():
        closed = points[has_gap] / gap[has_gap]
        claims[policy] = Claim(
            worst=float(points.min()),
            median=float(np.median(points)),
            mean=float(points.mean()),
            best=float(points.max()),
            below=float(np.mean(points < -SAME_POINTS)),
            gap_closed=float(closed.mean()) if len(closed) else float("nan"),
            fifth=float(np.mean(closed >= FIFTH)) if len(closed) else float("nan"),
            gap_sizes=len(closed),
        )
    return claims
