"""What hints win, by coverage, and what lies cost: `python -m benchmarks.hint_table [TRACE...]`.

Every way of hinting that `WAYS` names, on the second half of each file named and on generated loads with seeds on which
nothing was tuned, for each policy. A line for each load and policy, a cell for each way: the worst difference to LRU in
points of block hit rate over all sizes, and the mean share of LRU's gap to the optimum that is closed, in percent,
where that gap is above 5 points. Sizes go from 1 % of the working set to half of it. Below, over all loads and for each
way: the worst of all, how many of the pools are below LRU by more than 0.2 and 0.3 points, the mean difference, the
mean share of the gap, and the share of the pools in which a fifth of it or more is closed.

    python -m benchmarks.hint_table --sizes 300    # the normal way to make a claim; takes a quarter of an hour
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import blockyard
from blockyard.cli import build_name
from blockyard_lab import References, read_references
from blockyard_lab.curve import count_hits, lru_hits
from blockyard_lab.curve.curves import FIFTH, GAP_POINTS
from blockyard_lab.oracle import HintOracle
from blockyard_lab.policy_names import OPTIMUM, spread_sizes
from blockyard_lab.sweep import run_all
from blockyard_lab.traces import open_trace

from .policy_floor import SecondHalf

#: Nothing was tuned on these seeds, nor looked at before.
LOADS = (
    "chat:requests=400,seed=81",
    "agents:requests=80,seed=81",
    "coding:requests=120,seed=81,agents=6",
    "mix:requests=160,seed=81",
)
WAYS = {
    "over": HintOracle(),
    "over, half": HintOracle(coverage=0.5),
    "over, 10 % wrong": HintOracle(wrong=0.1),
    "over, all wrong": HintOracle(wrong=1.0),
}
POLICIES = ("lru", "density")


#: A pool that is below LRU by more than one of these, in points, counts as below it.
FLOORS = (0.2, 0.3)


@dataclass(frozen=True, slots=True)
class Row:
    """Of one policy and way on one load, for each pool: points above LRU, and LRU's gap to the optimum in points."""

    above: NDArray[np.float64]
    gap: NDArray[np.float64]

    @property
    def closed(self) -> NDArray[np.float64]:
        """The share of the gap that is closed, in percent, in the pools where it is wide."""
        wide = self.gap > GAP_POINTS
        return 100 * self.above[wide] / self.gap[wide]


def rows_for(
    references: References, policies: list[str], ways: list[HintOracle], num_sizes: int
) -> dict[str, list[Row]]:
    """For each policy a row without hints, and one for each of these ways of giving them."""
    working_set = references.working_set
    sizes = spread_sizes(num_sizes, working_set // 2, max(working_set // 100, 1))
    capacities = [max(round(size * references.rate), 1) for size in sizes]
    said = [None, *(way.mark_ends(references) for way in ways)]
    asked = [(policy, way) for policy in policies for way in said]
    runs: list[tuple[Any, ...]] = [(references, policy, size, way) for policy, way in asked for size in capacities]
    runs += [(references, OPTIMUM, size) for size in capacities]
    hits = np.array(run_all(count_hits, runs, jobs=len(os.sched_getaffinity(0)))).reshape(-1, len(capacities))
    points = 100 * hits / len(references.ids)
    lru = 100 * lru_hits(references)[capacities] / len(references.ids)
    rows = [Row(row - lru, points[-1] - lru) for row in points[:-1]]
    return {policy: rows[place * len(said) : (place + 1) * len(said)] for place, policy in enumerate(policies)}


def cell(row: Row) -> str:
    """The worst, and what of the gap is closed."""
    return f"{row.above.min():+.2f} / {mean_of(row.closed)}"


def mean_of(shares: NDArray[np.float64]) -> str:
    """In whole percent; "-" of none."""
    return f"{np.mean(shares):.0f}" if len(shares) else "-"


def summary(policy: str, loads: list[list[Row]]) -> list[str]:
    """Lines of the second table: one policy over all loads, a cell for each way. A load counts as much as another."""
    ways = list(zip(*loads, strict=True))
    lines = {"worst of all": [f"{min(row.above.min() for row in rows):+.2f}" for rows in ways]}
    for floor in FLOORS:
        lines[f"pools below -{floor}, %"] = [
            f"{100 * np.mean([np.mean(row.above < -floor) for row in rows]):.1f}" for rows in ways
        ]
    lines["mean, points"] = [f"{np.mean([row.above.mean() for row in rows]):+.2f}" for rows in ways]
    wide = [[row.closed for row in rows if len(row.closed)] for rows in ways]
    lines["gap closed, mean, %"] = [mean_of(np.array([closed.mean() for closed in rows])) for rows in wide]
    lines["pools with a fifth or more, %"] = [
        mean_of(np.array([100 * np.mean(closed >= 100 * FIFTH) for closed in rows])) for rows in wide
    ]
    return [f"| **{policy}**, {what} | {' | '.join(cells)} |" for what, cells in lines.items()]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="files, of which the second half is run")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names")
    parser.add_argument("--ways", default=";".join(WAYS), help="names of columns, with ; between them (all)")
    parser.add_argument("--sizes", type=int, default=20)
    parser.add_argument("--loads", default=",".join(map(str, range(len(LOADS)))), help="which of the generated ones")
    options = parser.parse_args()
    policies, ways = options.policies.split(","), [way.strip() for way in options.ways.split(";")]
    print(f"blockyard {blockyard.__version__}, {build_name()}, {options.sizes} sizes\n")
    heads = ["load, policy", "no hints", *ways]
    print("| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n", flush=True)
    found: dict[str, list[list[Row]]] = {policy: [] for policy in policies}
    for source in [*options.traces, *(LOADS[int(number)] for number in options.loads.split(",") if number)]:
        is_file = source in options.traces
        trace = SecondHalf(open_trace(source)) if is_file else open_trace(source)
        references = read_references(trace, with_sessions=True)
        name = f"{Path(source).name}, second half" if is_file else source
        for policy, rows in rows_for(references, policies, [WAYS[way] for way in ways], options.sizes).items():
            found[policy].append(rows)
            cells = " | ".join(cell(row) for row in rows)
            print(f"| {name} ({references.num_references:,} references), {policy} | {cells} |", flush=True)
    for policy, loads in found.items():
        print(*summary(policy, loads), sep="\n")


if __name__ == "__main__":
    main()
