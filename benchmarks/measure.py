"""How a figure is taken and printed: several rounds, the median, in nanoseconds an item."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill

DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    name: str
    size: str
    value: float
    unit: str
    spread: str
    bar: str = ""
    #: How the pool's free blocks lay, where the row depends on it.
    layout: str = ""
    #: What was counted, equal in each round and in each build that does the same.
    counts: str = ""

    @property
    def least(self) -> float:
        """The least of the rounds, three digits of it; the value where there is no range."""
        low, between, _ = self.spread.partition(" to ")
        return float(low) if between else self.value


def nanoseconds_an_item(work: Callable[[], int], rounds: int) -> list[float]:
    """Time `work`, which returns how many items it did, `rounds` times after one round that does not count."""
    work()
    figures = []
    for _ in range(rounds):
        start = time.perf_counter_ns()
        items = work()
        figures.append((time.perf_counter_ns() - start) / items)
    return figures


def figure(
    name: str, size: str, samples: list[float], unit: str, bar: str = "", scale: float = 1.0, layout: str = ""
) -> Figure:
    """The median of the samples, with their range."""
    values = sorted(sample * scale for sample in samples)
    spread = f"{values[0]:.3g} to {values[-1]:.3g}"
    return Figure(name, size, statistics.median(values), unit, spread, bar, layout)


def print_plain(row: Figure) -> None:
    print(
        f"{row.name:<42} {row.layout:<9} {row.size:>10} {row.value:>9.1f} {row.unit:<8} {row.spread:<18} "
        f"{row.bar}{row.counts}",
        flush=True,
    )


def markdown(row: Figure) -> str:
    return (
        f"| {row.name} | {row.layout} | {row.size} | {row.value:.1f} {row.unit} | {row.spread} | "
        f"{row.bar}{row.counts} |"
    )


def print_markdown(row: Figure) -> None:
    print(markdown(row), flush=True)


def print_json(row: Figure) -> None:
    print(json.dumps(asdict(row)), flush=True)


def write_figures(path: Path, heading: str, table: Iterable[str]) -> None:
    """Put a heading, wrapped, and a table in the place of the figures that a page has between its marks."""
    before, begin, rest = path.read_text().partition("<!-- figures -->\n")
    _, end, after = rest.partition("<!-- end -->\n")
    if not (begin and end):
        raise SystemExit(f"{path} has no place for figures between its marks")
    words = fill(heading, 120, break_long_words=False, break_on_hyphens=False)
    path.write_text("\n".join([before + begin + words, "", *table, end + after]))


#: What stands above the rows of each way to print them.
HEADERS = {
    print_plain: f"\n{'what':<42} {'layout':<9} {'size':>10} {'median':>9} {'unit':<8} {'range':<18} bar",
    print_markdown: "\n| what | layout | size | median | range | bar |\n|---|---|---|---|---|---|",
    print_json: "",
}
