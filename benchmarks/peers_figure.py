"""The bar chart of the README, drawn from the table in docs/peers.md: `python -m benchmarks.peers_figure`.

Nothing is measured here. After `make peers` has filled the table anew, run this and commit docs/images/peers.svg.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
SIZE, LAYOUT = "100k", "aged"
#: A row of the table, and its label. vLLM looks up from a list, the form its scheduler holds.
ROWS = {
    "lookup, a hit block, from a buffer": "look up a cached block",
    "lookup, hold and release, a hit block": "look up, hold, release",
    "allocate + publish a new block": "allocate + publish",
    "allocate + publish, evicting another": "the same, evicting",
    "free a block": "free a block",
}
FROM_A_LIST = "lookup, a hit block, from a list"
SYSTEMS = {"C": "#9aa5b1", "ours": "#1f6feb", "SGLang": "#e8a33d", "vLLM": "#c8553d"}
NAMES = {"C": "C with prefetch", "ours": "Blockyard", "SGLang": "SGLang, its best case", "vLLM": "vLLM"}


def read_table(page: str) -> dict[str, dict[str, float]]:
    """The nanoseconds of each row of `SIZE` blocks in `LAYOUT`, by system."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    header = next(cells for cells in lines if cells[0] == "row")
    found: dict[str, dict[str, float]] = {}
    for cells in lines:
        if len(cells) == len(header) and cells[1:3] == [LAYOUT, SIZE]:
            times = {name: re.fullmatch(r"([\d,.]+) ns", cells[header.index(name)]) for name in SYSTEMS}
            found[cells[0]] = {name: float(time[1].replace(",", "")) for name, time in times.items() if time}
    return found


def draw(table: dict[str, dict[str, float]], path: Path) -> None:
    """Grouped horizontal bars on a logarithmic axis, each with its number."""
    plt.rcParams.update({"svg.hashsalt": "blockyard", "font.size": 9, "font.family": "DejaVu Sans"})
    figure, axes = plt.subplots(figsize=(8.4, 4.6), layout="constrained")
    height = 0.2
    for number, (system, color) in enumerate(SYSTEMS.items()):
        for place, row in enumerate(ROWS):
            time = table[FROM_A_LIST if system == "vLLM" and row.endswith("from a buffer") else row][system]
            y = place + (number - 1.5) * height
            axes.barh(y, time, height * 0.92, color=color, label=NAMES[system] if place == 0 else None)
            weight = "bold" if system == "ours" else "normal"
            axes.text(time * 1.07, y, f"{time:,.3g}" if time < 1000 else f"{time:,.0f}", va="center", weight=weight)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 12_000)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_yticks(range(len(ROWS)), list(ROWS.values()))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(
        f"nanoseconds per block of 16 tokens, logarithmic scale; {LAYOUT} pool of {SIZE} blocks; shorter is faster"
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.42, 1.0))
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Draw docs/images/peers.svg."""
    draw(read_table((DOCS / "peers.md").read_text()), DOCS / "images" / "peers.svg")


if __name__ == "__main__":
    main()
