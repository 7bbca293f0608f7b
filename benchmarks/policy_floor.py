"""How far below least recently used each policy can be, and what it gains: `python -m benchmarks.policy_floor`.

Every policy over 300 sizes of loads that nothing was tuned on: the second half of each file
named, and traces of all generators, the hostile ones among them. A line for each load, a cell for each policy: its
worst difference to LRU in points, and the mean share of LRU's gap to the optimum that it closes, in percent, where that
gap is above 5 points. Prints each line as soon as it is there; below, over all loads, worst, median and mean.

All of it takes an hour or more. With --found FILE what was run is kept there, and not run again:

    python -m benchmarks.policy_floor trace.jsonl --found floor.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

import blockyard
from blockyard.cli import build_name
from blockyard.policies import POLICIES
from blockyard_lab import References, Trace, TraceRequest, read_references
from blockyard_lab.curve import Claim, HitCurves, hit_curves
from blockyard_lab.policy_names import OPTIMUM, spread_sizes
from blockyard_lab.traces import open_trace

SMALLEST_SHARE = 0.003
#: Nothing was tuned on these seeds, nor looked at before.
LOADS = (
    "turns:requests={n},seed=71,turn=40",
    "turns:requests={n},seed=71,turn=300",
    "trap:requests={n},seed=71,scans=300,collection=50",
    "memoryless:requests={n},seed=71",
    "coding:requests={n},seed=71,agents=12",
    "chat:requests={n},seed=71",
    "agents:requests={n},seed=71",
    "system:requests={n},seed=71",
    "rag:requests={n},seed=71",
    "scan:requests={n},seed=71",
    "bursts:requests={n},seed=71",
    "mix:requests={n},seed=71",
    "chat:requests={n},seed=72,users=300,turns=9",
    "memoryless:requests={n},seed=72,collection=60,ends=0.05",
)


class SecondHalf:
    """The later half of a trace's requests, as if nothing had been before."""

    def __init__(self, trace: Trace) -> None:
        self.name, self.hash_block_size, self.skips = trace.name, trace.hash_block_size, trace.skips
        self._trace, self._first = trace, sum(1 for _ in trace) // 2

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(iter(self._trace), self._first, None)


class Found:
    """Claims that were run before, a JSON object a line in `path`; none are kept where that is empty."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._claims: dict[tuple[str, int, str], Claim] = {}
        if path and Path(path).exists():
            for line in Path(path).read_text().splitlines():
                row = json.loads(line)
                self._claims[row["load"], row["sizes"], row["policy"]] = Claim(**row["claim"])

    def claims(self, load: str, sizes: int, policies: list[str]) -> dict[str, Claim]:
        """Of these policies, those that were run on the load."""
        return {name: self._claims[load, sizes, name] for name in policies if (load, sizes, name) in self._claims}

    def keep(self, load: str, sizes: int, claims: dict[str, Claim]) -> None:
        """Write them down."""
        for name, claim in claims.items():
            self._claims[load, sizes, name] = claim
            if self._path:
                with open(self._path, "a") as file:
                    file.write(
                        json.dumps({"load": load, "sizes": sizes, "policy": name, "claim": asdict(claim)}) + "\n"
                    )


def claims_for(references: References, name: str, policies: list[str], num_sizes: int) -> dict[str, Claim]:
    """Of all policies on one load."""
    working_set = references.working_set
    sizes = spread_sizes(num_sizes, working_set, max(round(SMALLEST_SHARE * working_set), 1))
    jobs = len(os.sched_getaffinity(0))
    curves: HitCurves = hit_curves(references, ["lru", *policies, OPTIMUM], sizes, name=name, jobs=jobs)
    return curves.claims()


def row_of(name: str, claims: dict[str, Claim]) -> str:
    """A line of the table."""
    cells = [f"{claim.worst:+.2f} / {_percent(claim.gap_closed)}" for claim in claims.values()]
    return f"| {name} | " + " | ".join(cells) + " |"


def _percent(share: float) -> str:
    return "-" if share != share else f"{100 * share:.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="files, of which the second half is run")
    everything = ",".join(name for name in POLICIES if name != "lru")
    parser.add_argument("--policies", default=everything, help="a cell for each, in this order (all)")
    parser.add_argument("--sizes", type=int, default=300, help="pools, from 0.3 %% of the contents to all (300)")
    parser.add_argument("--references", type=int, default=60_000, help="of a generated load, about (60000)")
    parser.add_argument("--loads", type=int, default=len(LOADS), help="how many of the generated ones (all)")
    parser.add_argument("--found", default="", help="a file that keeps what was run, so that another run goes on")
    options = parser.parse_args()
    policies = options.policies.split(",")
    print(f"blockyard {blockyard.__version__}, {build_name()}, {options.sizes} sizes\n")
    print("| load | " + " | ".join(policies) + " |", "|---" * (len(policies) + 1) + "|", sep="\n", flush=True)
    kept = Found(options.found)
    found: list[dict[str, Claim]] = []
    for source in [*options.traces, *LOADS[: options.loads]]:
        start = time.monotonic()
        if source in options.traces:
            references, name = read_references(SecondHalf(open_trace(source))), f"{Path(source).name}, second half"
        else:
            references, name = generated(source, options.references)
        claims = kept.claims(name, options.sizes, policies)
        missing = [policy for policy in policies if policy not in claims]
        if missing:
            kept.keep(name, options.sizes, claims_for(references, name, missing, options.sizes))
        found.append(kept.claims(name, options.sizes, policies))
        size = f"{references.num_references:,} references"
        print(row_of(f"{name} ({size}, {time.monotonic() - start:.0f} s)", found[-1]), flush=True)
    print(summary(policies, found))


def generated(pattern: str, num_references: int) -> tuple[References, str]:
    """A generator's trace of about `num_references` references: as many requests as that takes."""
    few = read_references(open_trace(pattern.format(n=200)))
    count = max(num_references * 200 // few.num_references, 200)
    name = pattern.format(n=count)
    return read_references(open_trace(name)), name


def summary(policies: list[str], found: list[dict[str, Claim]]) -> str:
    """Over all loads: the worst size of any, the mean of the means, how many loads have a size below -0.3."""
    worst = {policy: [claims[policy].worst for claims in found] for policy in policies}
    closed = {policy: [c[policy].gap_closed for c in found if c[policy].gap_sizes] for policy in policies}
    fifth = {policy: [c[policy].fifth for c in found if c[policy].gap_sizes] for policy in policies}
    mean = {policy: [claims[policy].mean for claims in found] for policy in policies}
    below = {policy: [claims[policy].below for claims in found] for policy in policies}
    lines = [
        ("worst of all", [f"{min(worst[policy]):+.2f}" for policy in policies]),
        ("median of the worst", [f"{np.median(worst[policy]):+.2f}" for policy in policies]),
        ("loads below -0.3", [str(sum(value < -0.3 for value in worst[policy])) for policy in policies]),
        ("mean of all sizes, points", [f"{np.mean(mean[policy]):+.2f}" for policy in policies]),
        ("sizes below LRU, mean, %", [_percent(float(np.mean(below[policy]))) for policy in policies]),
        ("gap closed, mean, %", [_percent(float(np.mean(closed[policy]))) for policy in policies]),
        ("sizes with a fifth or more, mean, %", [_percent(float(np.mean(fifth[policy]))) for policy in policies]),
    ]
    return "\n".join(f"| **{name}** | " + " | ".join(cells) + " |" for name, cells in lines)


if __name__ == "__main__":
    main()
