"""`python -m benchmarks.limit`: build the C program and print its rows."""

from __future__ import annotations

from ..workload import SIZES
from . import limit_rows


def main() -> None:
    """One line a row."""
    for row in limit_rows(SIZES):
        print(f"{row['name']:<32} {row['size']:>9,} {row['value']:>12,.1f} ns  {row['low']:.1f} to {row['high']:.1f}")


if __name__ == "__main__":
    main()
