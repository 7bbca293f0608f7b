"""The same loops in C, as the limit of what this machine can do: `python -m benchmarks.limit`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("limit.c")
#: How the free blocks of a pool lie. In order, only the first block of a run stands in the table.
LAYOUTS = ("shuffled", "in-order")


def build(folder: Path) -> Path:
    """Compile the program into `folder` with `gcc -O3`; raises CalledProcessError with gcc's words on stderr."""
    program = folder / "limit"
    subprocess.run(["gcc", "-std=c11", "-O3", "-Wall", "-Wextra", "-o", program, SOURCE], check=True)
    return program


def limit_rows(sizes: tuple[int, ...], layout: str = "shuffled") -> list[dict]:
    """Build and run: one row a loop and size with `name`, `size`, and `value`, `low`, `high` in nanoseconds.

    layout: of `LAYOUTS`. Leaves and decode steps, which have no runs, are rows of the shuffled pool alone.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        done = subprocess.run([program, layout, *map(str, sizes)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
