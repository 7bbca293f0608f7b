"""What hints win, by kind, coverage and error, and what lies cost: `python -m benchmarks.hint_table [TRACE...]`.

Every way of hinting that `WAYS` names, on the second half of each file named and on generated loads with seeds on which
nothing was tuned, for each policy. A line for each load and policy, a cell for each way: the worst difference to LRU in
points of block hit rate over all sizes, and the mean share of LRU's gap to the optimum that is closed, in percent,
where that gap is above 5 points. Sizes go from 1 % of the working set to half of it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import blockyard
from blockyard.lab.curve import count_hits, lru_hits
from blockyard.lab.curve.claims import GAP_POINTS
from blockyard.lab.oracle import HintOracle
from blockyard.lab.policy_names import OPTIMUM
from blockyard.lab.references import References, read_references
from blockyard.lab.sizes import spread_sizes
from blockyard.lab.sweep import run_all
from blockyard.lab.traces import open_trace

from .policy_floor import SecondHalf

#: Nothing was tuned on these seeds, nor looked at before.
LOADS = (
    "chat:requests=400,seed=81",
    "agents:requests=80,seed=81",
    "coding:requests=120,seed=81,agents=6",
    "mix:requests=160,seed=81",
)
WAYS = {
    "over": HintOracle(("over",)),
    "over, half": HintOracle(("over",), coverage=0.5),
    "wait": HintOracle(("wait",)),
    "wait, error 1": HintOracle(("wait",), error=1.0),
    "both": HintOracle(),
    "both, half": HintOracle(coverage=0.5),
    "both, error 1": HintOracle(error=1.0),
    "both, error 2.3": HintOracle(error=2.3),
    "both, 10 % wrong": HintOracle(wrong=0.1),
    "both, all wrong": HintOracle(wrong=1.0),
}
POLICIES = ("lru", "density", "guarded:density", "strict:density")


def cells_for(references: References, policies: list[str], num_sizes: int) -> dict[str, list[str]]:
    """For each policy a cell without hints, and one for each way of giving them."""
    working_set = references.working_set
    sizes = spread_sizes(num_sizes, working_set // 2, max(working_set // 100, 1))
    capacities = [max(round(size * references.rate), 1) for size in sizes]
    said = [None, *(oracle.say(references) for oracle in WAYS.values())]
    asked = [(policy, way) for policy in policies for way in said]
    runs: list[tuple[Any, ...]] = [(references, policy, size, way) for policy, way in asked for size in capacities]
    runs += [(references, OPTIMUM, size) for size in capacities]
    hits = np.array(run_all(count_hits, runs, jobs=len(os.sched_getaffinity(0)))).reshape(-1, len(capacities))
    points = 100 * hits / len(references.ids)
    lru = 100 * lru_hits(references)[capacities] / len(references.ids)
    cells = [cell(row - lru, points[-1] - lru) for row in points[:-1]]
    return {policy: cells[place * len(said) : (place + 1) * len(said)] for place, policy in enumerate(policies)}


def cell(above: NDArray[np.float64], gap: NDArray[np.float64]) -> str:
    """The worst, and what of the gap is closed."""
    wide = gap > GAP_POINTS
    closed = f"{100 * np.mean(above[wide] / gap[wide]):.0f}" if wide.any() else "-"
    return f"{above.min():+.2f} / {closed}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="files, of which the second half is run")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names")
    parser.add_argument("--sizes", type=int, default=20)
    parser.add_argument("--loads", default=",".join(map(str, range(len(LOADS)))), help="which of the generated ones")
    options = parser.parse_args()
    policies = options.policies.split(",")
    print(f"blockyard {blockyard.__version__}, {blockyard.build_name()}, {options.sizes} sizes\n")
    ways = ["no hints", *WAYS]
    print("| load, policy | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|", sep="\n", flush=True)
    for source in [*options.traces, *(LOADS[int(number)] for number in options.loads.split(",") if number)]:
        is_file = source in options.traces
        trace = SecondHalf(open_trace(source)) if is_file else open_trace(source)
        references = read_references(trace, with_sessions=True)
        name = f"{Path(source).name}, second half" if is_file else source
        for policy, cells in cells_for(references, policies, options.sizes).items():
            print(f"| {name} ({references.num_references:,} references), {policy} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
