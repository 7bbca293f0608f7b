"""The lines: policies, the room below the optimum, and the cache without a limit."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...policy_names import OPTIMUM
from ..hit_rates import HitCurves
from ..words import best_rates, infinite_of, parts_of
from .sheet import QUIET, SHADE, Sheet

#: So few sizes are shown as points too: lines between them alone would say more than was measured.
FEW_SIZES = 12


def draw_lines(sheet: Sheet) -> list[Any]:
    """Everything that runs along the capacities. Returns the texts at the lines of infinite caches. O(points)."""
    _shade_gap(sheet)
    for number, policy in enumerate(sheet.curves.hit_rates):
        _draw_policy(sheet, number, policy)
    return [_draw_infinite(sheet, part) for part in parts_of(sheet.curves)]


def _shade_gap(sheet: Sheet) -> None:
    curves, best = sheet.curves, best_rates(sheet.curves)
    if best is not None and OPTIMUM in curves.hit_rates:
        upper = np.maximum(curves.hit_rates[OPTIMUM], best)
        sheet.axes.fill_between(curves.sizes, 100 * best, 100 * upper, color=SHADE, linewidth=0, gid="gap")


def _draw_policy(sheet: Sheet, number: int, policy: str) -> None:
    """Its group in an SVG is called policy-0, policy-1 and so on, in the order of the curves."""
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
        sheet.shown(infinite_of(curves)), (0, rate), (4, 3), xycoords=axes.get_yaxis_transform(),
        textcoords="offset points", fontsize=9, color=QUIET, va="bottom", parse_math=False,
    )  # fmt: skip
