"""`python -m benchmarks.peers [--python PYTHON] [--sglang-python PYTHON] [--trace TRACE]`: ours, C and the peers.

One process a manager, one after another, ours first and once more at the end, so that drift shows. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from ..limit import limit_rows
from ..workload import SIZES
from .rows import Measured
from .table import Column, hit_lines, table_lines

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
    cells = {(row["name"], row["size"]): Measured(**row) for row in rows}
    return Column(name, head["version"], cells)


def our_column(trace: list[str]) -> Column:
    """Blockyard, by the interpreter that runs this."""
    column = measured_by("ours", sys.executable, "-m", "benchmarks.peers.ours", *trace)
    if column is None:
        raise SystemExit("Blockyard itself could not be measured")
    return column


def limit_column() -> Column:
    """The C program, built now."""
    cells = {(row["name"], row["size"]): Measured(row["name"], row["size"], row["value"]) for row in limit_rows(SIZES)}
    return Column("C", "gcc -O3", cells)


def peer_columns(python: str, sglang_python: str, trace: list[str]) -> list[Column]:
    """Each peer whose interpreter was named and that could be measured."""
    asked = (("vLLM", "vllm", python), ("SGLang", "sglang", sglang_python), ("nano-vllm-like", "nano", python))
    columns = [
        measured_by(name, interpreter, "-m", "benchmarks.peers.worker", module, *trace)
        for name, module, interpreter in asked
        if interpreter
    ]
    return [column for column in columns if column is not None]


def _absolute(interpreter: str) -> str:
    """The path as it is, links kept: a virtual environment is found by the link's own folder."""
    return os.path.abspath(interpreter) if interpreter else ""


def main() -> None:
    """Measure all and print the table, the hit tokens and what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="", help="the interpreter that has vLLM and xxhash")
    parser.add_argument("--sglang-python", default="", help="the interpreter that has SGLang")
    parser.add_argument("--trace", default="", help="a Mooncake JSONL file")
    args = parser.parse_args()
    trace = ["--trace", str(Path(args.trace).resolve())] if args.trace else []
    load = os.getloadavg()[0]
    before = our_column(trace)
    limit = limit_column()
    peers = peer_columns(_absolute(args.python), _absolute(args.sglang_python), trace)
    after = our_column(trace)
    versions = "; ".join(column.version for column in (before, limit, *peers))
    print(f"{versions}; Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores.")
    print(f"Processes at work on the machine: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end.\n")
    print(*table_lines(before, after, limit, peers), sep="\n")
    if trace:
        print("", *hit_lines([before, *peers]), sep="\n")


if __name__ == "__main__":
    main()
