"""How far a policy is from least recently used, over hundreds of sizes: `python -m benchmarks.policy_spread`.

A few sizes can flatter a policy. This prints, for the files named and for one trace of each generator, the deciles of
its distance from LRU over all sizes from 0.3 % of a trace's different blocks to all of them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockyard_lab import read_references
from blockyard_lab.curve import HitCurves, hit_curves
from blockyard_lab.policy_names import OPTIMUM
from blockyard_lab.traces import GENERATORS, open_trace

NUM_SIZES = 300
SMALLEST_SHARE = 0.003
#: Of the generators; nothing was tuned on it, nor looked at before.
SEED = 53
#: Agents have long prompts.
REQUESTS = {"agents": 700}
MAX_REFERENCES = 2**19
#: The share of LRU's gap that is closed says something where there is a gap, in points.
GAP_POINTS = 5.0
#: Differences smaller than this, in points, are none; and what `density` promised never to fall below.
SAME, PROMISED = 0.005, 0.3
HEAD = (
    "| load | references | sizes | below LRU | by more than 0.3 | worst | 10 % | 25 % | median | 75 % | 90 % | best | "
    "gap: sizes | closed, 10 % | median | mean | 90 % |"
)


@dataclass(frozen=True, slots=True)
class Spread:
    """load: its name. points: (S,) a policy's hit rate minus LRU's, in points. closed: the share of LRU's gap to the
    optimum that it closes, at the sizes where that gap is above `GAP_POINTS`."""

    load: str
    num_references: int
    points: NDArray[np.float64]
    closed: NDArray[np.float64]

    def row(self) -> str:
        """A line of the table."""
        deciles = np.quantile(self.points, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1]).tolist()
        below = [float(np.mean(self.points < -limit)) for limit in (SAME, PROMISED)]
        cells = [f"{self.num_references:,}", str(len(self.points)), *(f"{100 * share:.1f} %" for share in below)]
        cells += [f"{value:+.2f}" for value in deciles] + [str(len(self.closed))]
        if len(self.closed):
            low, median, high = np.quantile(self.closed, [0.1, 0.5, 0.9]).tolist()
            cells += [f"{100 * share:.0f} %" for share in (low, median, float(np.mean(self.closed)), high)]
        else:
            cells += ["-"] * 4
        return f"| {self.load} | " + " | ".join(cells) + " |"


def spread_of(curves: HitCurves, policy: str) -> Spread:
    """What the curves say of a policy."""
    lru, rates, best = (100 * curves.hit_rates[name] for name in ("lru", policy, OPTIMUM))
    has_gap = best - lru > GAP_POINTS
    closed = (rates - lru)[has_gap] / (best - lru)[has_gap]
    return Spread(curves.trace, curves.num_references, rates - lru, closed)


def curves_of(source: str, policy: str, num_sizes: int) -> HitCurves:
    """LRU, the policy and the optimum on one trace."""
    references = read_references(open_trace(source), max_references=MAX_REFERENCES)
    largest = references.working_set
    sizes = sorted({round(size) for size in np.geomspace(max(SMALLEST_SHARE * largest, 1), largest, num_sizes)})
    jobs = len(os.sched_getaffinity(0))
    return hit_curves(references, ["lru", policy, OPTIMUM], sizes, name=Path(source).name, jobs=jobs)


def main() -> None:
    """Print a line for each trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", help="files besides one trace of each generator")
    parser.add_argument("--policy", default="density")
    parser.add_argument("--sizes", type=int, default=NUM_SIZES)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    made = [f"{kind}:requests={REQUESTS.get(kind, 3000)},seed={options.seed}" for kind in GENERATORS]
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n", flush=True)
    for source in [*options.traces, *made]:
        print(spread_of(curves_of(source, options.policy, options.sizes), options.policy).row(), flush=True)


if __name__ == "__main__":
    main()
