"""All of the picture, as the bytes of a file."""

from __future__ import annotations

import io
import warnings
from typing import Any

import matplotlib.style

from ..hit_rates import HitCurves
from ..words import parts_of, title_of
from .curves import draw_differences, draw_lines
from .labels import label_lines, mark_knee
from .sheet import DPI, Sheet, draw_frame, families

#: Ids in an SVG are hashes with a salt that is random unless given. Text stays text there, to be searched and read
#: aloud. Points of lines are never thinned out.
SETTINGS = {"svg.hashsalt": "blockyard", "svg.fonttype": "none", "path.simplify": False}


def drawn(curves: HitCurves, kind: str, bytes_per_block: int, model: str) -> bytes:
    """The bytes of a "png" or "svg" file. A user's own settings of matplotlib change nothing. O(policies * sizes)."""
    with warnings.catch_warnings(), matplotlib.style.context(["default", {**SETTINGS, "font.family": families()}]):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # an SVG is shown with the fonts of who looks at it
        figure = figure_of(curves, bytes_per_block, model, keep_all_letters=kind == "svg")
        content = io.BytesIO()
        metadata = {"Date": None, "Title": title_of(curves)} if kind == "svg" else {"Software": None}
        figure.savefig(content, format=kind, dpi=DPI, metadata=metadata)
        return content.getvalue()


def figure_of(curves: HitCurves, bytes_per_block: int, model: str, *, keep_all_letters: bool) -> Any:
    """The figure itself, from the outside in: each part takes its place in what those before it have left."""
    sheet = Sheet(curves, keep_all_letters=keep_all_letters)
    draw_frame(sheet, bytes_per_block, model)
    words = draw_lines(sheet)
    draw_differences(sheet)
    label_lines(sheet)
    for part in parts_of(curves):
        words += mark_knee(sheet, part, words)
    return sheet.figure
