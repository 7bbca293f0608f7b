"""`python -m benchmarks.limit`: build the C program and print its rows, for each layout."""

from __future__ import annotations

from ..workload import SIZES
from . import LAYOUTS, limit_rows


def main() -> None:
    """One line a row."""
    for layout in LAYOUTS:
        for row in limit_rows(SIZES, layout):
            print(
                f"{layout:<10} {row['name']:<32} {row['size']:>9,} {row['value']:>12,.1f} ns  "
                f"{row['low']:.1f} to {row['high']:.1f}"
            )


if __name__ == "__main__":
    main()
