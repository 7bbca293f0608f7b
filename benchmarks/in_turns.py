"""Two or more builds at one benchmark, in turns, so that all meet the machine as it is.

    python -m benchmarks.in_turns [--turns N] [--own] CHECKOUT CHECKOUT... -- MODULE [OPTION...]

A checkout is a work tree with its .venv and its extension built (`git worktree add`, then `make` or `python setup.py
build_ext --inplace` there). MODULE is what this checkout has, `benchmarks` or `benchmarks.trace_life`, and is run with
--json; its program is the same for all builds, unless --own asks for each checkout's own. Rows are of the same name,
size and layout; where a build's rows have no layout, they are of shuffled pools. What a row counts must be equal.

Prints the median of each row's turns and the least of all its rounds by the first build, and the ratios of the others
to it. On a machine that others use the leasts are what compares.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from .measure import Figure

ROOT = Path(__file__).resolve().parents[1]
#: Name, size and layout of a row.
Key = tuple[str, str, str]
#: The turns of each row.
Rows = dict[Key, list[Figure]]


def sources_of(checkout: Path) -> list[Path]:
    """Return the folders of a checkout's sources: of all packages, or the one of a checkout from before the split."""
    return sorted(checkout.glob("packages/*/src")) or [checkout / "src"]


def run_turn(checkout: Path, own: bool, command: list[str], rows: Rows) -> None:
    """Run the benchmark once by the build in `checkout`, and add what it prints."""
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-m", *command, "--json"],
        cwd=checkout if own else ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources_of(checkout)))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = Figure(**json.loads(line))
            layout = "" if row.layout == "shuffled" else row.layout
            rows.setdefault((row.name, row.size, layout), []).append(row)


def table_lines(builds: list[Rows], names: list[str]) -> list[str]:
    """Rows that the first build has; ratios by the medians and by the least."""
    heads = [f"{names[0]}: median", "least", *(f"{name}: ratio of medians | of leasts" for name in names[1:])]
    lines = [
        f"| what | layout | size | {' | '.join(heads)} | counted |",
        "|---|---|---|" + "---|" * (2 * len(names) + 1),
    ]
    for key, first in builds[0].items():
        cells = [f"{taken(first):.4g}" for taken in (median, least)]
        counts = {row.counts for build in builds for row in build.get(key, [])}
        if len(counts) > 1:
            raise SystemExit(f"{' '.join(key)}: counted {' and '.join(sorted(counts))}")
        for build in builds[1:]:
            other = build.get(key, [])
            cells += [
                f"{taken(other) / taken(first):.2f}" if other and taken(first) else "" for taken in (median, least)
            ]
        name, size, layout = key
        lines.append(f"| {name} | {layout} | {size} | {' | '.join(cells)} | {counts.pop()} |")
    return lines


def median(turns: list[Figure]) -> float:
    return statistics.median(row.value for row in turns)


def least(turns: list[Figure]) -> float:
    return min(row.least for row in turns)


def main() -> None:
    """Run all builds in turns, in the other order every second time, and print the table."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.in_turns", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--own", action="store_true", help="the benchmark of each checkout, not of this one")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:split])
    command = arguments[split + 1 :] or ["benchmarks"]
    builds: list[Rows] = [{} for _ in args.checkouts]
    load = os.getloadavg()[0]
    for turn in range(args.turns):
        pairs = list(zip(args.checkouts, builds, strict=True))
        for checkout, rows in pairs if turn % 2 == 0 else reversed(pairs):
            run_turn(checkout.resolve(), args.own, command, rows)
        print(f"turn {turn + 1} of {args.turns}", file=sys.stderr, flush=True)
    print(f"{args.turns} turns; processes at work on the machine: {load:.1f} before, {os.getloadavg()[0]:.1f} after.\n")
    print(*table_lines(builds, [checkout.name for checkout in args.checkouts]), sep="\n")


if __name__ == "__main__":
    main()
