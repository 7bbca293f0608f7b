"""Words beside the lines: names at their ends, moved apart, and the knee with its sentence where it covers least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from ..printing import keep_end, printable
from .hit_rates import HitCurves
from .sheet import DPI, INK, QUIET, WIDTH, Sheet
from .side_by_side import label_in
from .words import knee_is_drawn, knee_of, parts_of


def spread_labels(wanted: Sequence[float], spacing: float, low: float, high: float) -> list[float] | None:
    """Return places at least `spacing` apart within low to high, in the order of `wanted`, near to what was wanted.

    wanted: ascending. None where they cannot all stand there. Labels that would touch become a group around the mean
    of what they wanted, as pooled adjacent violators of isotonic regression. O(labels).
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
    """Return the policies as their lines end. Lines that meet there have the order that they had on the way."""
    rates = sheet.curves.hit_rates
    return sorted(rates, key=lambda policy: (round(float(rates[policy][-1]), 3), float(np.mean(rates[policy]))))


def _limits(sheet: Sheet) -> tuple[float, float]:
    box = sheet.axes.get_position()
    return box.y0, box.y1


def _name(policy: str) -> str:
    return keep_end(printable(policy), MAX_CHARACTERS)


def _make_room(sheet: Sheet, pixels: float) -> None:
    """Make room beside the axes, for labels of this width."""
    left, bottom, _, height = sheet.axes.get_position().bounds
    taken = pixels / (WIDTH * DPI) + LEAD + PIECE + SPACE + 0.012
    sheet.axes.set_position((left, bottom, 1 - left - taken, height))
    left, bottom, _, height = sheet.lowest.get_position().bounds
    sheet.lowest.set_position((left, bottom, 1 - left - taken, height))


def _lead(sheet: Sheet, policy: str, place: float, text: Any) -> None:
    """Draw a thin line from the end of the policy's own to a piece of it before its name."""
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


#: Points from the knee to the sentence, and the corner of the sentence that is there; the first of equals is taken.
_Place = tuple[float, float, str, str]
_BESIDE = 7
_STEPS = 12  # between two points of a line, to see what lies on it


def mark_knee(sheet: Sheet, curves: HitCurves, other_texts: list[Any]) -> list[Any]:
    """Draw the knee of one trace's curves. other_texts: what its sentence must not lie on. Returns the sentence, if
    there is one. O(points)."""
    if not knee_is_drawn(curves):
        return []
    point = (float(curves.knee.blocks), 100 * curves.knee.hit_rate)
    color, _ = sheet.style_of(label_in(curves, curves.knee.policy))
    sheet.axes.plot([point[0]] * 2, [0, point[1]], color=color, linewidth=0.9, linestyle=(0, (1, 2)), gid="knee-stem")
    (dot,) = sheet.axes.plot(*[[value] for value in point], marker="o", markersize=8.5, color=color, clip_on=False)
    dot.set(markeredgecolor="white", markeredgewidth=1.6, zorder=7, gid="knee")
    words = sheet.shown(knee_of(curves))
    sentence = sheet.axes.annotate(
        words, point, (0, 0), textcoords="offset points", fontsize=9.5, weight="bold",
        color=INK, zorder=6, parse_math=False,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
    )  # fmt: skip
    traced = _traced(sheet)
    _move(sentence, min(_places(sheet, point), key=lambda place: _cost(sheet, sentence, place, traced, other_texts)))
    return [sentence]


def _places(sheet: Sheet, point: tuple[float, float]) -> list[_Place]:
    """List places beside the line from the knee down to the axis, nearest to the knee first; then above the knee."""
    below = sheet.axes.transData.transform(point)[1] - sheet.extent(sheet.axes).y0
    drops = [-float(drop) for drop in range(10, int(below * 72 / DPI) - 8, 8)]
    heights = [(drop, "top") for drop in drops] + [(10.0, "bottom"), (24.0, "bottom"), (42.0, "bottom")]
    sides = ((_BESIDE, "left"), (-_BESIDE, "right"))
    return [(across, up, horizontal, vertical) for up, vertical in heights for across, horizontal in sides]


def _move(sentence: Any, place: _Place) -> None:
    across, up, horizontal, vertical = place
    sentence.set(position=(across, up), ha=horizontal, va=vertical)


def _cost(sheet: Sheet, sentence: Any, place: _Place, traced: NDArray[np.float64], other_texts: list[Any]) -> int:
    """Say how bad it is there: outside of the axes, on the other text, on lines."""
    _move(sentence, place)
    box, frame = sheet.extent(sentence).padded(3), sheet.extent(sheet.axes)
    outside = bool(box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
    on_lines = np.all((traced > box.min) & (traced < box.max), axis=1)
    return (
        1_000_000 * outside
        + 100_000 * sum(bool(box.overlaps(sheet.extent(text))) for text in other_texts)
        + int(np.count_nonzero(on_lines))
    )


def _traced(sheet: Sheet) -> NDArray[np.float64]:
    """(P, 2) pixels that lie on the lines, close enough to one another that none passes a word unseen."""
    found = []
    for line in sheet.axes.get_lines():
        if line.get_gid() not in {"infinite", "knee-stem", "knee"}:
            pixels = line.get_transform().transform(np.asarray(line.get_xydata(), np.float64))
            steps = np.arange((len(pixels) - 1) * _STEPS + 1) / _STEPS
            found.append(np.stack([np.interp(steps, np.arange(len(pixels)), pixels[:, axis]) for axis in (0, 1)], 1))
    frame = sheet.extent(sheet.axes)
    across = np.linspace(frame.x0, frame.x1, 200)
    for part in parts_of(sheet.curves):
        height = sheet.axes.transData.transform((1.0, 100 * part.infinite))[1]
        found.append(np.stack([across, np.full(200, height)], 1))
    return np.concatenate(found)
