"""`python -m benchmarks [--trace TRACE] [--quick] [--json | --markdown]`: print the figures as a table."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import numpy as np

import blockyard
from blockyard.cli import build_name

from .aging import add_trace_option, read_trace
from .core import all_figures
from .measure import DOCS, HEADERS, markdown, print_json, print_markdown, print_plain, write_figures
from .workload import SIZES


def main() -> None:
    """Measure and print, a row at a time."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Figures of the control plane.")
    add_trace_option(parser)
    parser.add_argument("--quick", action="store_true", help="pools of 10k and 100k blocks only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="show", action="store_const", const=print_json, help="one JSON object a line")
    form.add_argument("--markdown", dest="show", action="store_const", const=print_markdown, help="a Markdown table")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md too")
    parser.set_defaults(show=print_plain)
    args = parser.parse_args()
    requests = read_trace(args.trace)
    load = os.getloadavg()[0]
    heading = (
        f"blockyard {blockyard.__version__}, {build_name()}; Python {platform.python_version()}, "
        f"numpy {np.__version__}, {platform.machine()}; pools aged by {Path(args.trace).name}"
    )
    if args.show is not print_json:
        print(heading)
        print(HEADERS[args.show])
    rows = []
    for row in all_figures(SIZES[:2] if args.quick else SIZES, requests):
        args.show(row)
        rows.append(row)
    if args.write:
        heading += f"; processes at work on the machine: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
        write_figures(DOCS / "benchmarks.md", heading, [HEADERS[print_markdown].strip(), *map(markdown, rows)])


if __name__ == "__main__":
    main()
