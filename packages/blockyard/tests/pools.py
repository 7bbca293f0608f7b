"""Many random walks over pools alone, each against the model: `python -m tests.pools 2000` walks as many.

python -m tests.pools 500 --seed 7
"""

from __future__ import annotations

import argparse
from collections import Counter

from .pool.test_pool_model import walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("walks", type=int, nargs="?", default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=400, help="calls a walk")
    given = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.walks):
        outcomes.update(walk(seed, given.calls).outcomes)
    for name, count in sorted(outcomes.items()):
        print(f"{name:35} {count}")


if __name__ == "__main__":
    main()
