"""`python -m benchmarks.peers.ours FOLDER`: Blockyard's rows by its own benchmarks, a JSON object a line."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import blockyard
from blockyard import BlockPool
from blockyard.cli import build_name

from ..core import decode_figures, layouts_for, life_figures, lookup_figures
from ..trace_life import live
from ..workload import BLOCK_SIZE, ROUNDS, SIZES, TRACE_FILE, read_requests
from .measuring import TRACE_REQUESTS, one_block_prompts
from .rows import (
    DECODE,
    EVICTING,
    FREE,
    LEAF,
    LEAF_SIZES,
    LEASE,
    LIFE,
    LOOK_UP_BUFFER,
    LOOK_UP_LIST,
    NUM_SEQS,
    PUBLISH,
    Measured,
)

#: What benchmarks/core.py calls the rows.
FIGURES = {
    "lookup, a hit block, verified (int32)": LOOK_UP_BUFFER,
    "lookup, a hit block, verified (list)": LOOK_UP_LIST,
    "lookup + lease + release": LEASE,
    "allocate + publish a new block": PUBLISH,
    "allocate + publish, evicting another": EVICTING,
    "free a block": FREE,
    "decode step, whole (mean of 16 steps)": DECODE,
}
NANOSECONDS = {"ns": 1.0, "us": 1e3}
LEAVES_A_ROUND = 2000


def our_rows(folder: Path) -> Iterator[Measured]:
    """Every row. Each aged pool has served the trace itself."""
    requests = list(read_requests(str(folder / TRACE_FILE)))
    for size in SIZES:
        for layout, make_pool in layouts_for(requests).items():
            for figure in (*lookup_figures(size, layout, make_pool), *life_figures(size, layout, make_pool)):
                yield Measured(FIGURES[figure.name], size, figure.least * NANOSECONDS[figure.unit], figure.layout)
    for size in LEAF_SIZES:
        yield leaf_row(size)
    for figure in decode_figures(NUM_SEQS):
        if figure.name in FIGURES:
            yield Measured(FIGURES[figure.name], NUM_SEQS, figure.least * NANOSECONDS[figure.unit])
    for size in SIZES:
        life = live(requests[:TRACE_REQUESTS], size)
        yield Measured(LIFE, size, life.seconds * 1e9, hit_tokens=life.num_hit_tokens)


def leaf_row(size: int) -> Measured:
    """A pool full of prompts of one block each, and one more after another."""
    pool = BlockPool(size, BLOCK_SIZE)

    def serve(prompts: list) -> None:
        for prompt in prompts:
            lease = pool.get_new_blocks(1)
            pool.cache_full_blocks(lease, prompt)
            pool.free_blocks(lease)

    serve(one_block_prompts(size - 1, 6))
    times = []
    for seed in range(10, 10 + ROUNDS):
        prompts = one_block_prompts(LEAVES_A_ROUND, seed)
        start = time.perf_counter_ns()
        serve(prompts)
        times.append((time.perf_counter_ns() - start) / len(prompts))
    return Measured(LEAF, size, min(times))


def main() -> None:
    """The version first, then the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the trace")
    args = parser.parse_args()
    print(json.dumps({"version": f"Blockyard {blockyard.__version__}, {build_name()}"}), flush=True)
    for row in our_rows(args.folder):
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
