"""What stands around the lines: axes, ticks, title and foot."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ...printing import compact, cut_off
from ..words import (
    capacity_axis,
    capacity_factor,
    foot_of,
    gap_of,
    subtitle_of,
    title_of,
    unmarked_knee_of,
)
from .sheet import FAINT, INK, QUIET, Sheet

#: Of characters: what fits across the figure in the title's and in the foot's size.
TITLE_CHARACTERS, FOOT_CHARACTERS = 70, 138


def draw_frame(sheet: Sheet, bytes_per_block: int, model: str) -> None:
    """Both axes of capacities, that of hit rates, and the words above and below. O(1)."""
    _draw_hit_rate_axis(sheet)
    _draw_capacity_axes(sheet, capacity_factor(sheet.curves, bytes_per_block))
    _write_words(sheet, capacity_axis(bytes_per_block, model))


def _draw_hit_rate_axis(sheet: Sheet) -> None:
    axes = sheet.axes
    axes.set_ylim(0, sheet.highest_percent())
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g} %"))
    axes.tick_params(axis="y", colors=QUIET, labelsize=9, length=0)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)


def _draw_capacity_axes(sheet: Sheet, factor: float) -> None:
    axes, low, high = sheet.axes, float(sheet.curves.sizes[0]), float(sheet.curves.sizes[-1])
    axes.set_xscale("log")
    low = low if high >= 1.5 * low else low / 10  # the last size is at the right edge, where the names are
    axes.set_xlim(low, high)
    second = axes.secondary_xaxis("top", functions=(lambda x: x * factor, lambda x: x / factor))
    second.spines["top"].set_visible(False)
    for axis, size in ((axes.xaxis, 9), (second.xaxis, 8.5)):
        _set_ticks(axis, high / low)
        axis.set_tick_params(colors=QUIET, labelsize=size, length=3)
    axes.set_xlabel("capacity (blocks)", color=QUIET, fontsize=9, labelpad=3)


def _set_ticks(axis: Any, span: float) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0,) if span > 5000 else (1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axis.set_minor_locator(NullLocator())


def _write_words(sheet: Sheet, second_axis: str) -> None:
    left, curves = 0.02, sheet.curves
    sheet.write(left, 0.945, cut_off(title_of(curves), TITLE_CHARACTERS), fontsize=14, weight="bold", color=INK)
    sheet.write(left, 0.905, subtitle_of(curves), fontsize=9.5, color=QUIET)
    sheet.write(0.07, 0.852, second_axis, fontsize=8.5, color=QUIET)
    lines = [
        line
        for said in (gap_of(curves), unmarked_knee_of(curves), foot_of(curves))
        for line in textwrap.wrap(said, FOOT_CHARACTERS)
    ]
    sheet.write(left, 0.025, "\n".join(lines), fontsize=8.5, color=QUIET, linespacing=1.45)
