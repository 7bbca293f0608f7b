"""`python -m benchmarks [--quick] [--json | --markdown]`: print the figures as a table."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict

import numpy as np

import blockyard
from blockyard._build import build_name

from .core import SIZES, all_figures
from .measure import Figure


def print_plain(row: Figure) -> None:
    print(f"{row.name:<42} {row.size:>10} {row.value:>9.1f} {row.unit:<8} {row.spread:<18} {row.bar}", flush=True)


def print_markdown(row: Figure) -> None:
    print(f"| {row.name} | {row.size} | {row.value:.1f} {row.unit} | {row.spread} | {row.bar} |", flush=True)


def print_json(row: Figure) -> None:
    print(json.dumps(asdict(row)), flush=True)


HEADERS = {
    print_plain: f"\n{'what':<42} {'size':>10} {'median':>9} {'unit':<8} {'range':<18} bar",
    print_markdown: "\n| what | size | median | range | bar |\n|---|---|---|---|---|",
    print_json: "",
}


def main() -> None:
    """Measure and print, a row at a time."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Figures of the control plane.")
    parser.add_argument("--quick", action="store_true", help="pools of 10k and 100k blocks only")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="show", action="store_const", const=print_json, help="one JSON object a line")
    form.add_argument("--markdown", dest="show", action="store_const", const=print_markdown, help="a Markdown table")
    parser.set_defaults(show=print_plain)
    args = parser.parse_args()
    if args.show is not print_json:
        print(
            f"blockyard {blockyard.__version__}, {build_name()}; Python {platform.python_version()}, "
            f"numpy {np.__version__}, {platform.machine()}"
        )
        print(HEADERS[args.show])
    for row in all_figures(SIZES[:2] if args.quick else SIZES):
        args.show(row)


if __name__ == "__main__":
    main()
