"""What is said about hit-rate curves, in pictures and on pages: the same words in both.

A claim is a policy's distance from least recently used over many sizes, the worst one first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..policy_names import OPTIMUM
from ..printing import count_of, keep_end, percent, printable, sentence, truncate
from .hit_rates import HitCurves
from .side_by_side import label_in

GIB = 2**30


def title_of(curves: HitCurves) -> str:
    """Return what is shown, and of which trace."""
    what = "Token hit rate by tier" if curves.tiers else "Block hit rate"
    if curves.parts:
        return f"{what} of {len(curves.parts)} traces"
    return f"{what} of {printable(curves.trace) or 'a trace'}"


def subtitle_of(curves: HitCurves) -> str:
    """Return how much there is in the trace, or in each."""
    if curves.parts:
        return "; ".join(
            f"{part.letter}: {truncate(printable(part.trace), 32)}, {count_of(part.num_requests, 'request')}, "
            f"{count_of(part.working_set, 'block')}"
            for part in curves.parts
        )
    tokens = f" of {count_of(curves.tokens_a_block, 'token')}" if curves.tokens_a_block else ""
    return (
        f"{count_of(curves.num_requests, 'request')}, {count_of(curves.num_references, 'block reference')}; "
        f"the working set is {count_of(curves.working_set, 'block')}{tokens}"
    )


def parts_of(curves: HitCurves) -> tuple[HitCurves, ...]:
    """Return the curves of each trace."""
    return curves.parts or (curves,)


def knee_of(curves: HitCurves) -> str:
    """Return where more blocks stop paying: "knee of lru: 38,667 blocks, 35.0 %"."""
    knee = curves.knee
    return f"knee of {label_in(curves, knee.policy)}: {count_of(knee.blocks, 'block')}, {percent(knee.hit_rate)}"


def knee_is_drawn(curves: HitCurves) -> bool:
    """Return whether the knee's policy is drawn, and the knee is between the capacities at both ends."""
    is_between = int(curves.sizes[0]) <= curves.knee.blocks <= int(curves.sizes[-1])
    return curves.knee.policy in curves.hit_rates and is_between


def unmarked_knee_of(curves: HitCurves) -> str:
    """Return the knees that are not drawn, in sentences."""
    hidden = [part for part in parts_of(curves) if not knee_is_drawn(part)]
    return " ".join(sentence(knee_of(part)) for part in hidden)


def infinite_of(curves: HitCurves) -> str:
    """Return what a cache without a limit would hit."""
    return f"{label_in(curves, 'infinite cache')}: {percent(curves.infinite)}"


def gap_of(curves: HitCurves) -> str:
    """Return what the shaded area means; "" where there is none."""
    best = best_rates(curves)
    if best is None or OPTIMUM not in curves.hit_rates:
        return ""
    best_is = "the sum of all places" if curves.tiers else "the best policy"
    gaps = np.maximum(curves.hit_rates[OPTIMUM] - best, 0)
    widest = int(np.argmax(gaps))
    if gaps[widest] < 0.0005:
        return f"{best_is[0].upper()}{best_is[1:]} reaches the optimum, an upper bound for all, at every capacity here."
    where = f"at most {100 * gaps[widest]:.1f} points, at {count_of(int(curves.sizes[widest]), 'block')}"
    return f"Shaded: from {best_is} here up to the optimum, an upper bound for all; {where}."


def foot_of(curves: HitCurves) -> str:
    """Say how the numbers came about."""
    said = "One request after another, in the order of the trace."
    if curves.sample_rate < 1:
        said += f" Sampled: 1 block in {1 / curves.sample_rate:,.0f}."
    if curves.tiers:
        said += f" {curves.tiers}."
    if curves.hints:
        said += f" Hints: {curves.hints}."
    if curves.error:
        said += f" The band of {', '.join(map(printable, curves.error))} is two standard errors to each side."
    return said


def best_rates(curves: HitCurves) -> NDArray[np.float64] | None:
    """(S,) the highest hit rate of any policy that can be run, or None where only the optimum is there."""
    rates = [rates for policy, rates in curves.hit_rates.items() if policy != OPTIMUM]
    return np.max(rates, axis=0) if rates else None


def above_lru(curves: HitCurves) -> dict[str, NDArray[np.float64]]:
    """Policy to (S,) points of hit rate above LRU's; for policies that can be run, empty where LRU is not there."""
    if "lru" not in curves.hit_rates:
        return {}
    lru = curves.hit_rates["lru"]
    others = {policy: rates for policy, rates in curves.hit_rates.items() if policy not in {"lru", OPTIMUM}}
    return {policy: 100 * (rates - lru) for policy, rates in others.items()}


def capacity_axis(bytes_per_block: int, model: str) -> str:
    """Return what stands at the second axis of capacities."""
    if not bytes_per_block:
        return "capacity (tokens)"
    return f"capacity (GiB of {keep_end(printable(model), 48)})" if model else "capacity (GiB)"


def capacity_factor(curves: HitCurves, bytes_per_block: int) -> float:
    """Return how much of the second axis one block is: GiB, or tokens where no model is named."""
    return bytes_per_block / GIB if bytes_per_block else float(max(curves.tokens_a_block, 1))


#: Fewer sizes hide where a policy loses.
ENOUGH_SIZES = 100
#: Differences smaller than this, in points, are none.
SAME_POINTS = 0.005
#: The share of LRU's gap to the optimum says something where that gap is above this many points.
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
    """Return a claim for each policy besides LRU and the optimum; none where LRU was not run. O(policies * sizes)."""
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
