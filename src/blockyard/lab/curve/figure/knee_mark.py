"""The knee: a point, and a sentence beside it where it covers least."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hit_rates import HitCurves
from ..side_by_side import label_in
from ..words import knee_is_drawn, knee_of, parts_of
from .sheet import DPI, INK, Sheet

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
    """Beside the line from the knee down to the axis, nearest to the knee first; then above the knee."""
    below = sheet.axes.transData.transform(point)[1] - sheet.extent(sheet.axes).y0
    drops = [-float(drop) for drop in range(10, int(below * 72 / DPI) - 8, 8)]
    heights = [(drop, "top") for drop in drops] + [(10.0, "bottom"), (24.0, "bottom"), (42.0, "bottom")]
    sides = ((_BESIDE, "left"), (-_BESIDE, "right"))
    return [(across, up, horizontal, vertical) for up, vertical in heights for across, horizontal in sides]


def _move(sentence: Any, place: _Place) -> None:
    across, up, horizontal, vertical = place
    sentence.set(position=(across, up), ha=horizontal, va=vertical)


def _cost(sheet: Sheet, sentence: Any, place: _Place, traced: NDArray[np.float64], other_texts: list[Any]) -> int:
    """How bad it is there: outside of the axes, on the other text, on lines."""
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
