"""Names at the ends of lines, moved apart; a box below where there are more than fit beside the axes."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from ...printing import printable, shortened
from .label_places import spread_labels
from .sheet import DPI, INK, QUIET, WIDTH, Sheet

LABEL_SIZE, MAX_CHARACTERS = 9.5, 26
#: Shares of the figure: labels from one another, the lead to a label, the label's own piece of line, the space after.
SPACING, LEAD, PIECE, SPACE = 0.034, 0.022, 0.02, 0.006
#: Of the box, in inches a row.
ROW, COLUMNS = 0.175, 3


def label_lines(sheet: Sheet) -> None:
    """Name every line, at its end if all names have room there. O(policies)."""
    policies = _from_below(sheet)
    low, high = _limits(sheet)
    places = spread_labels([sheet.end_of_line(policy)[1] for policy in policies], SPACING, low, high)
    if places is None:
        _draw_box(sheet)
        return
    named = list(zip(policies, places, strict=True))
    texts = [sheet.write(0, place, _name(policy), fontsize=LABEL_SIZE, color=INK) for policy, place in named]
    _make_room(sheet, max(sheet.extent(text).width for text in texts))
    for (policy, place), text in zip(named, texts, strict=True):
        _lead(sheet, policy, place, text)


def _from_below(sheet: Sheet) -> list[str]:
    """The policies as their lines end. Lines that meet there have the order that they had on the way."""
    rates = sheet.curves.hit_rates
    return sorted(rates, key=lambda policy: (round(float(rates[policy][-1]), 3), float(np.mean(rates[policy]))))


def _limits(sheet: Sheet) -> tuple[float, float]:
    box = sheet.axes.get_position()
    return box.y0, box.y1


def _name(policy: str) -> str:
    return shortened(printable(policy), MAX_CHARACTERS)


def _make_room(sheet: Sheet, pixels: float) -> None:
    """Beside the axes, for labels so wide."""
    left, bottom, _, height = sheet.axes.get_position().bounds
    taken = pixels / (WIDTH * DPI) + LEAD + PIECE + SPACE + 0.012
    sheet.axes.set_position((left, bottom, 1 - left - taken, height))
    left, bottom, _, height = sheet.lowest.get_position().bounds
    sheet.lowest.set_position((left, bottom, 1 - left - taken, height))


def _lead(sheet: Sheet, policy: str, place: float, text: Any) -> None:
    """A thin line from the end of the policy's own to a piece of it before its name."""
    color, dashes = sheet.style_of(policy)
    x, y = sheet.end_of_line(policy)
    start = sheet.axes.get_position().x1 + LEAD
    sheet.figure.add_artist(Line2D([x, start], [y, place], color=color, linewidth=0.8, alpha=0.6))
    style: Any = (0, [part / 1.4 for part in dashes]) if dashes else "-"
    sheet.figure.add_artist(Line2D([start, start + PIECE], [place, place], color=color, linewidth=2.6, linestyle=style))
    text.set(x=start + PIECE + SPACE, va="center_baseline")


def _draw_box(sheet: Sheet) -> None:
    lines = [line for line in sheet.axes.get_lines() if str(line.get_gid()).startswith("policy-")]
    names = [sheet.shown(_name(policy)) for policy in sheet.curves.hit_rates]
    sheet.grow(ROW * -(-len(names) // COLUMNS) + 0.15)
    place = (0.02, sheet.lowest.get_position().y0 - 0.45 / float(sheet.figure.get_size_inches()[1]))
    box = sheet.figure.legend(
        lines, names, loc="upper left", bbox_to_anchor=place, ncols=COLUMNS, fontsize=8.5, frameon=False,
        labelcolor=QUIET, borderpad=0, borderaxespad=0,
    )  # fmt: skip
    for text in box.get_texts():
        text.set_parse_math(False)
