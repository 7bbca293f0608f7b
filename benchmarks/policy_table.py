"""Every policy, least recently used and the optimum among them, on every trace: `python -m benchmarks.policy_table`.

Prints the tables of docs/policy-table.md: block hit rates at six shares of each trace's different blocks, of the files
named, the shipped trace and one trace of each generator.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from blockyard.policies import POLICIES
from blockyard_lab import read_references
from blockyard_lab.curve import HitCurves, hit_curves
from blockyard_lab.policy_names import OPTIMUM
from blockyard_lab.traces import GENERATORS, open_trace

SHARES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
#: Of the generators; nothing was tuned on it.
SEED = 31
MAX_REFERENCES = 2**19


def curves_of(source: str) -> HitCurves:
    """All policies on one trace."""
    references = read_references(open_trace(source), max_references=MAX_REFERENCES)
    sizes = sorted({max(round(share * references.working_set), 1) for share in SHARES})
    jobs = len(os.sched_getaffinity(0))
    return hit_curves(references, [*POLICIES, OPTIMUM], sizes, name=Path(source).name, jobs=jobs)


def table_of(curves: HitCurves) -> str:
    """A table of one trace: percentages, the best online policy of each size in bold."""
    sizes = curves.sizes.tolist()
    sampled = "" if curves.sample_rate == 1 else f", a sample of one block in {round(1 / curves.sample_rate)}"
    lines = [
        f"**{curves.trace}**: {curves.num_requests:,} requests, {curves.num_references:,} references to "
        f"{curves.working_set:,} blocks of {curves.tokens_a_block}{sampled}",
        "",
        "| blocks | " + " | ".join(f"{size:,}" for size in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    online = [rates for policy, rates in curves.hit_rates.items() if policy != OPTIMUM]
    best = [max(round(float(rates[place]), 4) for rates in online) for place in range(len(sizes))]
    for policy, rates in curves.hit_rates.items():
        cells = [_cell(float(rate), top, policy) for rate, top in zip(rates, best, strict=True)]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rate: float, best: float, policy: str) -> str:
    text = f"{100 * rate:.2f}"
    return f"**{text}**" if policy != OPTIMUM and round(rate, 4) == best else text


def main() -> None:
    """Print a table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*", help="files besides the shipped trace and the generators")
    options = parser.parse_args()
    made = [f"{kind}:requests=4000,seed={SEED}" for kind in GENERATORS]
    for source in [*options.traces, "small", *made]:
        print(table_of(curves_of(source)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
