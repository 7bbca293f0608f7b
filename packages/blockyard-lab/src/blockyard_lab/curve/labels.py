"""Places texts: names at the ends of lines, moved apart, and the knee's caption where it covers least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..printing import keep_end, printable
from .captions import knee_is_drawn, knee_of
from .curves import HitCurves
from .sheet import DPI, INK, QUIET, WIDTH, Sheet


def spread_labels(wanted: Sequence[float], spacing: float, low: float, high: float) -> list[float] | None:
    """Return positions from `low` to `high`, at least `spacing` apart and close to `wanted`, in its order.

    Labels that would overlap form a group around the mean of their wanted positions (pooled adjacent violators, as in
    isotonic regression). None if they do not fit. O(labels).

    Args:
        wanted: wanted positions, ascending.
        spacing: smallest distance between two labels.
        low: lowest position.
        high: highest position.
    """
    if (len(wanted) - 1) * spacing > high - low:
        return None
    groups: list[tuple[float, int]] = []  # the sum of the wanted places of the first label, and how many labels
    for number, place in enumerate(wanted):
        total, count = place - number * spacing, 1
        while groups and groups[-1][0] / groups[-1][1] >= total / count:
            total, count = total + groups[-1][0], count + groups[-1][1]
            groups.pop()
        groups.append((total, count))
    top = high - (len(wanted) - 1) * spacing
    firsts = [min(max(total / count, low), top) for total, count in groups for _ in range(count)]
    return [first + number * spacing for number, first in enumerate(firsts)]


LABEL_SIZE, MAX_CHARACTERS = 9.5, 26
#: Fractions of the figure: distance of labels, length of the lead, length of the line sample, space after it.
SPACING, LEAD, PIECE, SPACE = 0.034, 0.022, 0.02, 0.006
#: Of the box: inches per row, and columns.
ROW, COLUMNS = 0.175, 3


def label_lines(sheet: Sheet) -> None:
    """Write each line's name at its end, or all names in a box if they do not fit. O(policies)."""
    rates, axes_box = sheet.curves.hit_rates, sheet.axes.get_position()
    # Lines that end at the same rate are ordered by their means.
    policies = sorted(rates, key=lambda policy: (round(float(rates[policy][-1]), 3), float(np.mean(rates[policy]))))
    wanted = [sheet.end_of_line(policy)[1] for policy in policies]
    heights = spread_labels(wanted, SPACING, axes_box.y0, axes_box.y1)
    if heights is None:
        _draw_box(sheet)
        return
    named = list(zip(policies, heights, strict=True))
    texts = [sheet.write(0, height, _name(policy), fontsize=LABEL_SIZE, color=INK) for policy, height in named]
    widest = max(sheet.extent(text).width for text in texts)
    taken = widest / (WIDTH * DPI) + LEAD + PIECE + SPACE + 0.012
    for axes in (sheet.axes, sheet.lowest):
        left, bottom, _, height = axes.get_position().bounds
        axes.set_position((left, bottom, 1 - left - taken, height))
    for (policy, height), text in zip(named, texts, strict=True):
        _draw_lead(sheet, policy, height, text)


def _name(policy: str) -> str:
    return keep_end(printable(policy), MAX_CHARACTERS)


def _draw_lead(sheet: Sheet, policy: str, height: float, text: Any) -> None:
    """Draw a thin line from the end of a policy's line to its label."""
    color, dashes = sheet.style_of(policy)
    x, y = sheet.end_of_line(policy)
    start = sheet.axes.get_position().x1 + LEAD
    sheet.figure.add_artist(Line2D([x, start], [y, height], color=color, linewidth=0.8, alpha=0.6))
    style: Any = (0, [part / 1.4 for part in dashes]) if dashes else "-"
    ends = [start, start + PIECE], [height, height]
    sheet.figure.add_artist(Line2D(*ends, color=color, linewidth=2.6, linestyle=style))
    text.set(x=start + PIECE + SPACE, va="center_baseline")


def _draw_box(sheet: Sheet) -> None:
    lines = [line for line in sheet.axes.get_lines() if str(line.get_gid()).startswith("policy-")]
    names = [sheet.displayable(_name(policy)) for policy in sheet.curves.hit_rates]
    sheet.grow(ROW * -(-len(names) // COLUMNS) + 0.15)
    corner = (0.02, sheet.lowest.get_position().y0 - 0.45 / float(sheet.figure.get_size_inches()[1]))
    box = sheet.figure.legend(
        lines, names, loc="upper left", bbox_to_anchor=corner, ncols=COLUMNS, fontsize=8.5, frameon=False,
        labelcolor=QUIET, borderpad=0, borderaxespad=0,
    )  # fmt: skip
    for text in box.get_texts():
        text.set_parse_math(False)


#: Offset from the knee to the caption, in points, and the caption's corner there.
_Position = tuple[float, float, str, str]
_BESIDE = 7
_STEPS = 12  # between two points of a line


def mark_knee(sheet: Sheet, curves: HitCurves, other_texts: list[Any]) -> list[Any]:
    """Draw the knee of one trace's curves with its caption. O(points).

    Args:
        sheet: the picture.
        curves: the trace's curves.
        other_texts: texts that the caption must not cover.

    Returns:
        The caption, if there is one.
    """
    if not knee_is_drawn(curves):
        return []
    point = (float(curves.knee.blocks), 100 * curves.knee.hit_rate)
    color, _ = sheet.style_of(curves.label(curves.knee.policy))
    sheet.axes.plot([point[0]] * 2, [0, point[1]], color=color, linewidth=0.9, linestyle=(0, (1, 2)), gid="knee-stem")
    (dot,) = sheet.axes.plot(*[[value] for value in point], marker="o", markersize=8.5, color=color, clip_on=False)
    dot.set(markeredgecolor="white", markeredgewidth=1.6, zorder=7, gid="knee")
    words = sheet.displayable(knee_of(curves))
    sentence = sheet.axes.annotate(
        words, point, (0, 0), textcoords="offset points", fontsize=9.5, weight="bold",
        color=INK, zorder=6, parse_math=False,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
    )  # fmt: skip
    pixels = _line_pixels(sheet)
    _move(sentence, min(_candidates(sheet, point), key=lambda at: _cost(sheet, sentence, at, pixels, other_texts)))
    return [sentence]


def _candidates(sheet: Sheet, point: tuple[float, float]) -> list[_Position]:
    """Return positions next to the line from the knee down to the axis, nearest first, then above the knee."""
    below = sheet.axes.transData.transform(point)[1] - sheet.extent(sheet.axes).y0
    drops = [-float(drop) for drop in range(10, int(below * 72 / DPI) - 8, 8)]
    heights = [(drop, "top") for drop in drops] + [(10.0, "bottom"), (24.0, "bottom"), (42.0, "bottom")]
    sides = ((_BESIDE, "left"), (-_BESIDE, "right"))
    return [(across, up, horizontal, vertical) for up, vertical in heights for across, horizontal in sides]


def _move(sentence: Any, position: _Position) -> None:
    across, up, horizontal, vertical = position
    sentence.set(position=(across, up), ha=horizontal, va=vertical)


def _cost(sheet: Sheet, sentence: Any, position: _Position, pixels: NDArray[np.float64], other_texts: list[Any]) -> int:
    """Return how bad a position is: outside the axes, over other texts, over lines."""
    _move(sentence, position)
    box, frame = sheet.extent(sentence).padded(3), sheet.extent(sheet.axes)
    outside = bool(box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
    on_lines = np.all((pixels > box.min) & (pixels < box.max), axis=1)
    return (
        1_000_000 * outside
        + 100_000 * sum(bool(box.overlaps(sheet.extent(text))) for text in other_texts)
        + int(np.count_nonzero(on_lines))
    )


def _line_pixels(sheet: Sheet) -> NDArray[np.float64]:
    """Return (P, 2) pixels on the lines, so dense that no line crosses a text unnoticed."""
    found = []
    for line in sheet.axes.get_lines():
        if line.get_gid() not in {"infinite", "knee-stem", "knee"}:
            pixels = line.get_transform().transform(np.asarray(line.get_xydata(), np.float64))
            steps = np.arange((len(pixels) - 1) * _STEPS + 1) / _STEPS
            found.append(np.stack([np.interp(steps, np.arange(len(pixels)), pixels[:, axis]) for axis in (0, 1)], 1))
    frame = sheet.extent(sheet.axes)
    across = np.linspace(frame.x0, frame.x1, 200)
    for part in sheet.curves.per_trace:
        height = sheet.axes.transData.transform((1.0, 100 * part.infinite))[1]
        found.append(np.stack([across, np.full(200, height)], 1))
    return np.concatenate(found)
