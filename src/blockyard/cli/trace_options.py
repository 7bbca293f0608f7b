"""Options that every command over a trace has, and what they come to."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ..arguments import require_int
from ..lab import Trace
from ..lab.sweep import MAX_JOBS, require_backend

_TRACE_HELP = (
    "a file (Mooncake or Qwen-Bailian JSONL, Azure or BurstGPT CSV, JSONL of token ids or text; .gz and .zst too), or "
    "a generator such as chat:requests=10000,seed=1; default: the small trace that ships with the package"
)


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the trace, and of how to read it."""
    parser.add_argument("trace", nargs="?", default="small", metavar="TRACE", help=_TRACE_HELP)
    group = parser.add_argument_group("reading")
    add_format_options(group)
    group.add_argument("--max-requests", type=int, metavar="N", help="read N requests at most")
    group.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first bad line or request that never fits; default: count it",
    )


def add_format_options(group: Any) -> None:
    """Adds the options that say what a trace file is, where its lines do not."""
    group.add_argument(
        "--format", default="auto", metavar="NAME", help="the trace's format; default: by its first line"
    )
    group.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer for a trace of text")


def add_running_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say how many processes run, and where."""
    group = parser.add_argument_group("running")
    group.add_argument("--jobs", type=int, metavar="N", help="processes at once; default: one a core")
    group.add_argument(
        "--backend", default="processes", metavar="NAME", help="processes, ray or dask (joblib's); default: processes"
    )
    group.add_argument("--quiet", action="store_true", help="draw no progress bar")


def add_output_options(parser: argparse.ArgumentParser, line: str) -> None:
    """Adds the forms for programs; line: what a line of the CSV is for."""
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    output.add_argument("--csv", action="store_true", help=f"print a line for each {line}")


def open_chosen_trace(options: argparse.Namespace, name: str | None = None) -> Trace:
    """Opens the trace that the options name, or another one, to be read in the same way."""
    from ..lab.traces import open_trace

    return open_trace(
        options.trace if name is None else name,
        format=options.format,
        strict=options.strict,
        tokenizer=options.tokenizer,
        max_requests=options.max_requests,
    )


def chosen_jobs(options: argparse.Namespace, num_cells: int) -> int:
    """Returns the processes at once: as asked for, or one a core, and no more than there is to do."""
    require_backend(options.backend)
    wanted = len(os.sched_getaffinity(0)) if options.jobs is None else require_int("--jobs", options.jobs, 1, MAX_JOBS)
    return max(1, min(wanted, num_cells))


def short_name(trace: Trace) -> str:
    """Returns the trace's name as a heading has it, that of a file without its folders."""
    return Path(trace.name).name


def report_skips(trace: Trace) -> None:
    """Say on stderr what the latest walk left out or corrected."""
    for cause, (count, first) in trace.skips.causes.items():
        print(f"blockyard: {count} x {cause} (first: {first})", file=sys.stderr)


def skips_as_dict(trace: Trace) -> dict[str, Any]:
    """Returns the same for a program."""
    return {cause: {"count": count, "first": first} for cause, (count, first) in trace.skips.causes.items()}
