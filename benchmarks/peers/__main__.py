"""`python -m benchmarks.peers [--python PYTHON] [--sglang-python PYTHON] [--trace TRACE]`: ours, C and the peers.

One process a manager, one after another, in several turns, so that drift shows. Each finds the trace in a folder, and
the order in which it left the free blocks of a pool of each size. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from ..aging import add_trace_option, write_folder
from ..limit import limit_rows
from ..measure import DOCS, write_figures
from ..workload import SIZES
from .rows import AGED, NEW, ROWS, SHUFFLED, Measured
from .table import Column, hit_lines, least_of, table_lines

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}


def measured_by(name: str, *command: str) -> Column | None:
    """Run one process that prints a version and rows; None, with the reason on stderr, if it cannot."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **QUIET}, capture_output=True, text=True)
    print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    if done.returncode != 0:
        print(f"{name} is left out: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}", file=sys.stderr)
        return None
    head, *rows = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    measured = [Measured(**row) for row in rows]
    return Column(name, head["version"], {row.key: row for row in measured})


def our_column(folder: str) -> Column:
    """Blockyard, by the interpreter that runs this."""
    column = measured_by("ours", sys.executable, "-m", "benchmarks.peers.ours", folder)
    if column is None:
        raise SystemExit("Blockyard itself could not be measured")
    return column


def limit_column() -> Column:
    """The C program, built now. It has no trace: beside aged rows stands what it takes with all blocks in order."""
    lies = {row.name for row in ROWS if row.layout}
    rows = [
        Measured(row["name"], row["size"], row["low"], layout if row["name"] in lies else NEW)
        for layout, program in ((AGED, "in-order"), (SHUFFLED, "shuffled"))
        for row in limit_rows(SIZES, program)
    ]
    return Column("C", "gcc -O3", {row.key: row for row in rows})


def peer_columns(python: str, sglang_python: str, folder: str) -> Iterator[Column]:
    """Each peer whose interpreter was named and that could be measured."""
    asked = (("vLLM", "vllm", python), ("SGLang", "sglang", sglang_python), ("nano-vllm-like", "nano", python))
    for name, module, interpreter in asked:
        if interpreter:
            column = measured_by(name, interpreter, "-m", "benchmarks.peers.worker", module, folder)
            if column is not None:
                yield column


def _absolute(interpreter: str) -> str:
    """The path as it is, links kept: a virtual environment is found by the link's own folder."""
    return os.path.abspath(interpreter) if interpreter else ""


def main() -> None:
    """Measure all and print the table, the hit tokens and what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="the interpreter that has vLLM and xxhash")
    parser.add_argument("--sglang-python", default="", help="the interpreter that has SGLang")
    parser.add_argument("--turns", type=int, default=2, help="the least of this many runs of each counts (default: 2)")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/peers.md too")
    add_trace_option(parser)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    turns: list[list[Column]] = []
    with TemporaryDirectory() as folder:
        aged = "; ".join(write_folder(args.trace, Path(folder)))
        for _ in range(args.turns):
            peers = peer_columns(_absolute(args.python), _absolute(args.sglang_python), folder)
            turns.append([our_column(folder), limit_column(), *peers])
    names = [column.name for column in turns[0]]
    found = {name: [column for turn in turns for column in turn if column.name == name] for name in names}
    ours, limit, *others = [least_of(columns) for columns in found.values()]
    versions = "; ".join(column.version for column in (ours, limit, *others))
    heading = (
        f"{versions}; Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores. Processes at "
        f"work on the machine: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end. Pools aged by "
        f"{Path(args.trace).name}: {aged}."
    )
    table = [*table_lines(found[ours.name], limit, others), "", *hit_lines([ours, *others])]
    print(heading, "", *table, sep="\n")
    if args.write:
        write_figures(DOCS / "peers.md", heading, table)


if __name__ == "__main__":
    main()
