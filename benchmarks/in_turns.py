"""Two or more builds at one benchmark, in turns, so that all meet the machine as it is.

    python -m benchmarks.in_turns [--turns N] [--own] CHECKOUT CHECKOUT... -- MODULE [OPTION...]

A checkout is a work tree with its .venv and its extension built (`git worktree add`, then `make` or `python setup.py
build_ext --inplace` there). MODULE is what this checkout has, `benchmarks` or `benchmarks.trace_life`, and is run with
--json; its program is the same for all builds, unless --own asks for each checkout's own. Rows are of the same name,
size and layout; where a build's rows have no layout, they are of shuffled pools. What a row counts must be equal.

Prints each row's median and least of all turns by the first build, and the ratios of the others to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Name, size and layout of a row.
Key = tuple[str, str, str]
#: The values of a row, a turn each, and what it counted.
Rows = dict[Key, tuple[list[float], str]]


def run_turn(checkout: Path, own: bool, command: list[str], rows: Rows) -> None:
    """Run the benchmark once by the build in `checkout`, and add what it prints."""
    done = subprocess.run(
        [checkout / ".venv" / "bin" / "python", "-m", *command, "--json"],
        cwd=checkout if own else ROOT,
        env={**os.environ, "PYTHONPATH": str(checkout / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            layout = row.get("layout", "")
            key = row["name"], row["size"], "" if layout == "shuffled" else layout
            values, counts = rows.setdefault(key, ([], row.get("counts", "")))
            values.append(row["value"])
            require_equal(key, counts, row.get("counts", ""))


def require_equal(key: Key, first: str, other: str) -> None:
    if first != other:
        raise SystemExit(f"{' '.join(key)} counted {first} and then {other}")


def table_lines(builds: list[Rows], names: list[str]) -> list[str]:
    """Rows that the first build has; ratios by the medians and by the least."""
    heads = [f"{names[0]}: median", "least", *(f"{name}: ratio of medians | of leasts" for name in names[1:])]
    lines = [
        f"| what | layout | size | {' | '.join(heads)} | counted |",
        "|---|---|---|" + "---|" * (2 * len(names) + 1),
    ]
    for key, (values, counts) in builds[0].items():
        cells = [f"{statistics.median(values):.4g}", f"{min(values):.4g}"]
        for build in builds[1:]:
            cells += ratios(values, build[key][0]) if key in build else ["", ""]
            require_equal(key, counts, build.get(key, ([], counts))[1] or counts)
        name, size, layout = key
        lines.append(f"| {name} | {layout} | {size} | {' | '.join(cells)} | {counts} |")
    return lines


def ratios(first: list[float], other: list[float]) -> list[str]:
    return [f"{taken(other) / taken(first):.2f}" if taken(first) else "" for taken in (statistics.median, min)]


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
