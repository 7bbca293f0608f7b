"""What hints win where only a part of the sessions gives them: `python -m benchmarks.hint_coverage [TRACE...]`.

Each kind of load is generated with several seeds on which nothing was tuned; of each file the second half is run, with
sessions drawn anew for each seed. A line for each kind and policy, a cell for each way of hinting: the share of LRU's
gap to the optimum that is closed in percent, the median of the seeds (the lowest to the highest), each the mean of the
sizes where that gap is above 5 points; then the worst difference to LRU in points of block hit rate over all
seeds and sizes. Sizes go from 1 % of the working set to half of it. In the last column every hint is wrong.

    python -m benchmarks.hint_coverage TRACE        # the table of docs/hints.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

import blockyard
from blockyard.cli import build_name
from blockyard_lab import References, read_references
from blockyard_lab.oracle import HintOracle
from blockyard_lab.traces import open_trace

from .hint_table import Row, rows_for
from .policy_floor import SecondHalf

LOADS = ("chat:requests=400", "agents:requests=80", "coding:requests=120,agents=6", "mix:requests=160")
#: Nothing was tuned on loads of these seeds and the following ones, nor looked at before.
FIRST_SEED = 301
COVERAGES = (0.25, 0.5, 0.75, 1.0)
WAYS = {f"over, {100 * share:.0f} %": HintOracle(share) for share in COVERAGES}
WAYS["over, all wrong"] = HintOracle(wrong=1.0)
POLICIES = ("lru", "density")


def loads_of(source: str, is_file: bool, seeds: range) -> Iterator[References]:
    """A load for each seed: of a generator another one, of a file the same."""
    if is_file:
        references = read_references(SecondHalf(open_trace(source)), with_sessions=True)
        yield from (references for _ in seeds)
    else:
        yield from (read_references(open_trace(f"{source},seed={seed}"), with_sessions=True) for seed in seeds)


def cell(rows: list[Row]) -> str:
    """The gap closed at the median seed, the lowest and the highest; and the worst of all points."""
    closed = [row.closed.mean() for row in rows if len(row.closed)]
    worst = min(row.above.min() for row in rows)
    if not closed:
        return f"- / {worst:+.2f}"
    low, median, high = (round(share) for share in np.quantile(closed, (0, 0.5, 1)))
    return f"{median} ({low} to {high}) / {worst:+.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="files, of which the second half is run")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names")
    parser.add_argument("--sizes", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    options = parser.parse_args()
    policies, seeds = options.policies.split(","), range(FIRST_SEED, FIRST_SEED + options.seeds)
    print(f"blockyard {blockyard.__version__}, {build_name()}, {options.seeds} seeds, {options.sizes} sizes\n")
    heads = ["load", "policy", "no hints", *WAYS]
    print("| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", sep="\n", flush=True)
    for source in [*LOADS, *options.traces]:
        is_file = source in options.traces
        found: dict[str, list[list[Row]]] = {policy: [] for policy in policies}
        for seed, references in zip(seeds, loads_of(source, is_file, seeds), strict=True):
            oracles = [replace(oracle, seed=seed) for oracle in WAYS.values()]
            for policy, rows in rows_for(references, policies, oracles, options.sizes).items():
                found[policy].append(rows)
        name = f"{Path(source).name}, second half" if is_file else source
        for policy, by_seed in found.items():
            cells = " | ".join(cell(list(rows)) for rows in zip(*by_seed, strict=True))
            print(f"| {name} | {policy} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
