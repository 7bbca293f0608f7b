"""`python -m benchmarks [--quick] [--json]`: print the figures as a table."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict

import numpy as np

import blockyard

from .core import SIZES, all_figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description="Figures of the control plane.")
    parser.add_argument("--quick", action="store_true", help="pools of 10k and 100k blocks only")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    print(
        f"blockyard {blockyard.__version__}, {blockyard.build_name()}; Python {platform.python_version()}, "
        f"numpy {np.__version__}, {platform.machine()}"
    )
    if not args.json:
        print(f"\n{'what':<42} {'size':>10} {'median':>9} {'unit':<8} {'range':<18} bar")
    for row in all_figures(SIZES[:2] if args.quick else SIZES):
        if args.json:
            print(json.dumps(asdict(row)), flush=True)
        else:
            print(
                f"{row.name:<42} {row.size:>10} {row.value:>9.1f} {row.unit:<8} {row.spread:<18} {row.bar}",
                flush=True,
            )


if __name__ == "__main__":
    main()
