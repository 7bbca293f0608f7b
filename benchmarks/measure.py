"""How a figure is taken: several rounds, the median, in nanoseconds an item."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    size: str
    value: float
    unit: str
    spread: str
    bar: str = ""


def nanoseconds_an_item(work: Callable[[], int], rounds: int) -> list[float]:
    """Time `work`, which returns how many items it did, `rounds` times after one round that does not count."""
    work()
    figures = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        items = work()
        figures.append((time.perf_counter_ns() - start) / items)
    return figures


def figure(name: str, size: str, samples: list[float], unit: str, bar: str = "", scale: float = 1.0) -> Figure:
    """The median of the samples, with their range."""
    values = sorted(sample * scale for sample in samples)
    spread = f"{values[0]:.3g} to {values[-1]:.3g}"
    return Figure(name, size, statistics.median(values), unit, spread, bar)
