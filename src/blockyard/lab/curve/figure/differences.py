"""A second pair of axes below: how many points each policy is above least recently used, or below it."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from ...printing import points
from ..words import above_lru
from .curves import FEW_SIZES
from .sheet import FAINT, INK, QUIET, Sheet

#: Inches: what is added to the figure, and how much of it the axes are.
ROOM, HEIGHT = 1.95, 1.3


def draw_differences(sheet: Sheet) -> None:
    """Add the axes, where LRU and another policy that can be run are there. O(points)."""
    differences = above_lru(sheet.curves)
    if not differences or len(sheet.curves.sizes) < 2:
        return
    axes = sheet.add_below(ROOM, HEIGHT)
    _draw_frame(sheet, axes)
    marker = "o" if len(sheet.curves.sizes) <= FEW_SIZES else ""
    for policy, points_above in differences.items():
        color, dashes = sheet.style_of(policy)
        (line,) = axes.plot(sheet.curves.sizes, points_above, color=color, linewidth=1.6, marker=marker, markersize=3.5)
        line.set(linestyle=(0, dashes) if dashes else "-", gid=f"above-{list(sheet.curves.hit_rates).index(policy)}")


def _draw_frame(sheet: Sheet, axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_xlim(*sheet.axes.get_xlim())
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(sheet.axes.xaxis.get_major_locator())
    axes.xaxis.set_major_formatter(sheet.axes.xaxis.get_major_formatter())
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: points(value)))
    axes.tick_params(axis="y", colors=QUIET, labelsize=9, length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=9, length=3)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.axhline(0, color=sheet.style_of("lru")[0], linewidth=1.8, zorder=2)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.set_title("points above lru", loc="left", fontsize=9, color=INK, pad=5)
