"""Random programs with waiting requests, each answer compared with the manager's: `python -m tests.waiting 1000`.

python -m tests.waiting 1000 --seed 7 --calls 60
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

from blockyard.cli import build_name

from .support.waiting_world import run_any_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=60, help="calls a program")
    given = parser.parse_args()
    print(f"seeds {given.seed} to {given.seed + given.programs - 1}, {build_name()}", flush=True)
    began = time.perf_counter()
    counts: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.programs):
        counts += run_any_world(seed, given.calls)
    for name in ("num_answers", "num_hits", "num_joining", "admitted"):
        print(f"{counts[name]:12}  {name}")
    print(f"{given.programs} programs, no difference, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
