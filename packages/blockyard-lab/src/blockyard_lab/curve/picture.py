"""Renders hit-rate curves: lines, the gap to the optimum, and distances from LRU.

Uses matplotlib's objects without pyplot, and changes no global settings.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..policy_names import OPTIMUM
from ..printing import points
from .captions import best_rates, infinite_of, title_of
from .curves import HitCurves
from .labels import label_lines, mark_knee
from .sheet import DPI, FAINT, INK, QUIET, SHADE, Sheet, draw_frame, families

#: Up to this many sizes are also drawn as points, since lines alone would suggest more than was measured.
FEW_SIZES = 12


def draw_lines(sheet: Sheet) -> list[Any]:
    """Draw everything over the capacities and return the texts at the lines of infinite caches. O(points)."""
    curves, best = sheet.curves, best_rates(sheet.curves)
    if best is not None and OPTIMUM in curves.hit_rates:
        upper = np.maximum(curves.hit_rates[OPTIMUM], best)
        sheet.axes.fill_between(curves.sizes, 100 * best, 100 * upper, color=SHADE, linewidth=0, gid="gap")
    for number, policy in enumerate(sheet.curves.hit_rates):
        _draw_policy(sheet, number, policy)
    return [_draw_infinite(sheet, part) for part in sheet.curves.per_trace]


def _draw_policy(sheet: Sheet, number: int, policy: str) -> None:
    """Draw a policy's line. Its group in an SVG is policy-0, policy-1 and so on, in the order of the curves."""
    sizes, rates = sheet.curves.sizes, 100 * sheet.curves.hit_rates[policy]
    color, dashes = sheet.style_of(policy)
    marker = "o" if len(sizes) <= FEW_SIZES else ""
    (line,) = sheet.axes.plot(sizes, rates, color=color, linewidth=1.8, marker=marker, markersize=4.5, clip_on=False)
    line.set(linestyle=(0, dashes) if dashes else "-", gid=f"policy-{number}", zorder=3 if policy == OPTIMUM else 4)
    if policy in sheet.curves.error:
        spread = 200 * sheet.curves.error[policy]
        low, high = np.clip(rates - spread, 0, 100), np.clip(rates + spread, 0, 100)
        sheet.axes.fill_between(sizes, low, high, color=color, alpha=0.2, linewidth=0, gid=f"band-{number}")


def _draw_infinite(sheet: Sheet, curves: HitCurves) -> Any:
    axes, rate = sheet.axes, 100 * curves.infinite
    axes.axhline(rate, color=QUIET, linewidth=1.1, linestyle=(0, (1, 2)), zorder=2, gid="infinite")
    return axes.annotate(
        sheet.displayable(infinite_of(curves)), (0, rate), (4, 3), xycoords=axes.get_yaxis_transform(),
        textcoords="offset points", fontsize=9, color=QUIET, va="bottom", parse_math=False,
    )  # fmt: skip


#: Inches added to the figure, and the height of the axes in them.
ROOM, HEIGHT = 1.95, 1.3


def draw_below(sheet: Sheet) -> None:
    """Draw a second pair of axes: points above LRU, or the first of the further figures (`beside`). O(points)."""
    differences, beside = sheet.curves.above_lru(), sheet.curves.beside
    if not (differences or beside) or len(sheet.curves.sizes) < 2:
        return
    axes = sheet.add_below(ROOM, HEIGHT)
    if beside:
        name, values = next(iter(beside.items()))
        _draw_frame(sheet, axes, name, lambda value: f"{value:.6g}")
        axes.plot(sheet.curves.sizes, values, color=INK, linewidth=1.6, marker="o", markersize=3.5, gid="beside")
        axes.set_ylim(bottom=0)
        return
    _draw_frame(sheet, axes, "points above lru", points)
    axes.axhline(0, color=sheet.style_of("lru")[0], linewidth=1.8, zorder=2)
    marker = "o" if len(sheet.curves.sizes) <= FEW_SIZES else ""
    for policy, points_above in differences.items():
        color, dashes = sheet.style_of(policy)
        (line,) = axes.plot(sheet.curves.sizes, points_above, color=color, linewidth=1.6, marker=marker, markersize=3.5)
        line.set(linestyle=(0, dashes) if dashes else "-", gid=f"above-{list(sheet.curves.hit_rates).index(policy)}")


def _draw_frame(sheet: Sheet, axes: Any, title: str, shown: Callable[[float], str]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(*sheet.axes.get_xlim())
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(sheet.axes.xaxis.get_major_locator())
    axes.xaxis.set_major_formatter(sheet.axes.xaxis.get_major_formatter())
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axes.tick_params(axis="y", colors=QUIET, labelsize=9, length=0)
    axes.tick_params(axis="x", colors=QUIET, labelsize=9, length=3)
    axes.grid(True, axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.set_title(title, loc="left", fontsize=9, color=INK, pad=5)


#: Ids in an SVG are hashes with a salt that is random unless given. Text stays text there, to be searched and read
#: aloud. Points of lines are never thinned out.
SETTINGS = {"svg.hashsalt": "blockyard", "svg.fonttype": "none", "path.simplify": False}


def render(curves: HitCurves, kind: str, bytes_per_block: int, model: str) -> bytes:
    """Return a "png" or "svg" file. The user's matplotlib settings have no effect. O(policies * sizes)."""
    with warnings.catch_warnings(), matplotlib.style.context(["default", {**SETTINGS, "font.family": families()}]):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a viewer shows an SVG with its own fonts
        figure = make_figure(curves, bytes_per_block, model, keep_all_letters=kind == "svg")
        content = io.BytesIO()
        metadata = {"Date": None, "Title": title_of(curves)} if kind == "svg" else {"Software": None}
        figure.savefig(content, format=kind, dpi=DPI, metadata=metadata)
        return content.getvalue()


def make_figure(curves: HitCurves, bytes_per_block: int, model: str, *, keep_all_letters: bool) -> Any:
    """Return the figure. Each part takes its space from the remainder of the parts before it."""
    sheet = Sheet(curves, keep_all_letters=keep_all_letters)
    draw_frame(sheet, bytes_per_block, model)
    words = draw_lines(sheet)
    draw_below(sheet)
    label_lines(sheet)
    for part in curves.per_trace:
        words += mark_knee(sheet, part, words)
    return sheet.figure
