"""How fast the lab is on a trace: `python -m benchmarks.lab TRACE`.

The replay sends every request through the manager, one after another, with blocks of 16 tokens. vLLM 0.32's own block
pool takes 34 s for the 12,031 requests of the Mooncake conversation trace. The curve is 40 sizes by 5 policies and the
optimum, in as many processes as there are cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import blockyard
from blockyard.cli import build_name
from blockyard_lab import References, Trace, read_references
from blockyard_lab.curve import count_hits, hit_curves, lru_hits
from blockyard_lab.policy_names import OPTIMUM, spread_sizes
from blockyard_lab.replay import ReplayOptions, replay
from blockyard_lab.survey import survey
from blockyard_lab.traces import open_trace

POLICIES = ("lru", "lfu", "s3fifo", "arc", "density")
VLLM_SECONDS = 34.0
VLLM_REQUESTS = 12_031


def median_seconds(function: Callable[[], object], rounds: int) -> float:
    """The median of several calls, after one that does not count."""
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def replay_figures(trace: Trace, rounds: int) -> None:
    """The closed loop, reading the trace included."""
    found = survey(trace)
    for num_blocks in (10_000, 100_000):
        for find_causes in (False, True):
            options = ReplayOptions(num_blocks, max_model_len=found.longest_sequence, find_causes=find_causes)
            runs = [replay(trace, options, clock=time.perf_counter) for _ in range(rounds + 1)][1:]
            seconds = statistics.median(run.seconds for run in runs)
            against = f", {VLLM_SECONDS / seconds:.1f} times vLLM's" if found.num_requests == VLLM_REQUESTS else ""
            causes = "with causes" if find_causes else "no causes"
            print(
                f"replay, {num_blocks:>7,} blocks, {causes:<11} {seconds:6.3f} s, "
                f"{seconds / runs[0].num_blocks_handled * 1e9:.0f} ns a block{against}"
            )


def curve_figures(references: References, rounds: int) -> None:
    """One pass for LRU, a run of every policy, and the whole curve."""
    num_references = len(references.ids)
    print(f"LRU at all sizes           {median_seconds(lambda: lru_hits(references), rounds):6.3f} s")
    for policy in (*POLICIES, OPTIMUM):
        seconds = median_seconds(lambda name=policy: count_hits(references, name, 10_000), rounds)
        print(f"{policy:<10} 10,000 blocks   {seconds:6.3f} s, {seconds / num_references * 1e9:.0f} ns a reference")
    sizes = spread_sizes(40, references.working_set)
    jobs = len(os.sched_getaffinity(0))
    seconds = median_seconds(lambda: hit_curves(references, [*POLICIES, OPTIMUM], sizes, jobs=jobs), 1)
    print(f"curve, {len(sizes)} sizes x {len(POLICIES)} policies and the optimum, {jobs} processes: {seconds:.1f} s")


def main() -> None:
    """Print the figures of one trace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", help="a file or a generator")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    trace = open_trace(options.trace)
    print(f"blockyard {blockyard.__version__}, {build_name()}; load {os.getloadavg()[0]:.1f}")
    reading = median_seconds(lambda: sum(1 for _ in trace), options.rounds)
    print(f"reading the trace          {reading:6.3f} s")
    replay_figures(trace, options.rounds)
    curve_figures(read_references(trace), options.rounds)


if __name__ == "__main__":
    main()
