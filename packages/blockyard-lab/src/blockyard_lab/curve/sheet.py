"""The figure: axes, ticks and texts. Text is never interpreted as mathematics."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from ..printing import compact, truncate
from .captions import capacity_axis, capacity_factor, foot_of, gap_of, subtitle_of, title_of, unmarked_knee_of
from .curves import HitCurves
from .side_by_side import COLORS, DASHES, OPTIMUM_DASHES, line_styles_of

INK, QUIET, FAINT, SHADE = "#1a1f26", "#5a6472", "#e3e6ea", "#e9edf2"
WIDTH, HEIGHT, DPI = 9.6, 5.6, 160
LEFT, RIGHT, BOTTOM, TOP = 0.07, 0.03, 0.205, 0.2
#: matplotlib brings the first. The others have letters that it lacks and are used if installed.
_FAMILIES = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Micro Hei", "Noto Sans", "Noto Emoji")


class Sheet:
    """A picture under construction.

    Args:
        curves: the curves to draw.
        keep_all_letters: keep letters that no font here has, for a viewer that may have one; otherwise draw "?".
    """

    def __init__(self, curves: HitCurves, *, keep_all_letters: bool) -> None:
        self.curves = curves
        self.styles = line_styles_of(curves)
        self.figure: Any = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, facecolor="white")
        self.renderer: Any = FigureCanvasAgg(self.figure).get_renderer()
        self.axes: Any = self.figure.add_axes((LEFT, BOTTOM, 1 - LEFT - RIGHT, 1 - BOTTOM - TOP))
        #: The lowest axes: these, or a second pair below them.
        self.lowest: Any = self.axes
        self._letters = None if keep_all_letters else _letters()

    def displayable(self, text: str) -> str:
        """Return `text` with "?" for letters that would be drawn as empty boxes."""
        if self._letters is None:
            return text
        return "".join(letter if letter == "\n" or ord(letter) in self._letters else "?" for letter in text)

    def write(self, x: float, y: float, text: str, **options: Any) -> Any:
        """Write text at (x, y), as fractions of the figure from the lower left."""
        return self.figure.text(x, y, self.displayable(text), parse_math=False, **options)

    def grow(self, inches: float) -> None:
        """Add height between the axes and the foot. Everything above keeps its distance from the top."""
        before = float(self.figure.get_size_inches()[1])
        taller = before + inches
        self.figure.set_size_inches(WIDTH, taller)
        for axes in self.figure.axes:
            left, bottom, width, height = axes.get_position().bounds
            axes.set_position((left, (bottom * before + inches) / taller, width, height * before / taller))
        for text in self.figure.texts:
            y = text.get_position()[1] * before
            text.set_y((y + inches if y > before / 2 else y) / taller)

    def add_below(self, inches: float, height: float) -> Any:
        """Add a second pair of axes, which takes over the capacity labels.

        Args:
            inches: height added to the figure.
            height: height of the new axes, in inches.
        """
        self.grow(inches)
        total = float(self.figure.get_size_inches()[1])
        box = self.axes.get_position()
        self.lowest = self.figure.add_axes((box.x0, box.y0 - inches / total, box.width, height / total))
        self.lowest.set_xlabel(self.axes.get_xlabel(), color=QUIET, fontsize=9, labelpad=3)
        self.axes.set_xlabel("")
        return self.lowest

    def style_of(self, policy: str) -> tuple[str, tuple[float, ...]]:
        """Return the colour and dashes of a policy's line."""
        style = self.styles[policy]
        if style < 0:
            return INK, OPTIMUM_DASHES[(-1 - style) % len(OPTIMUM_DASHES)]
        return COLORS[style % len(COLORS)], DASHES[style // len(COLORS) % len(DASHES)]

    def extent(self, artist: Any) -> Any:
        """Return an artist's box in pixels."""
        return artist.get_window_extent(self.renderer)

    def end_of_line(self, policy: str) -> tuple[float, float]:
        """Return where a policy's line ends, as fractions of the figure."""
        rate = 100 * float(self.curves.hit_rates[policy][-1])
        pixels = self.axes.transData.transform((float(self.curves.sizes[-1]), rate))
        x, y = self.figure.transFigure.inverted().transform(pixels)
        return float(x), float(y)

    def highest_percent(self) -> float:
        """Return the upper end of the hit-rate axis, a little above everything on it."""
        curves = self.curves
        rates = [float(np.max(rates)) for rates in curves.hit_rates.values()]
        highest = 100 * max(curves.infinite, *rates)
        return min(highest * 1.14, 109.0) if highest >= 0.001 else 1.0


def families() -> list[str]:
    """Return the preferred fonts that are installed, best first."""
    installed = {font.name for font in font_manager.fontManager.ttflist}
    return [name for name in _FAMILIES if name in installed]


def _letters() -> set[int]:
    """Return every letter that one of these fonts has."""
    paths = {font_manager.findfont(name) for name in families()}
    return {letter for path in paths for letter in FT2Font(path).get_charmap()}


#: Characters that fit across the figure, in the title's and in the foot's size.
TITLE_CHARACTERS, FOOT_CHARACTERS = 70, 138


def draw_frame(sheet: Sheet, bytes_per_block: int, model: str) -> None:
    """Draw the axes and the texts above and below. O(1)."""
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
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 5000 else (1.0, 2.0, 5.0), numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
        axis.set_minor_locator(NullLocator())
        axis.set_tick_params(colors=QUIET, labelsize=size, length=3)
    axes.set_xlabel("capacity (blocks)", color=QUIET, fontsize=9, labelpad=3)


def _write_words(sheet: Sheet, second_axis: str) -> None:
    left, curves = 0.02, sheet.curves
    sheet.write(left, 0.945, truncate(title_of(curves), TITLE_CHARACTERS), fontsize=14, weight="bold", color=INK)
    sheet.write(left, 0.905, subtitle_of(curves), fontsize=9.5, color=QUIET)
    sheet.write(0.07, 0.852, second_axis, fontsize=8.5, color=QUIET)
    lines = [
        line
        for said in (gap_of(curves), unmarked_knee_of(curves), foot_of(curves))
        for line in textwrap.wrap(said, FOOT_CHARACTERS)
    ]
    sheet.write(left, 0.025, "\n".join(lines), fontsize=8.5, color=QUIET, linespacing=1.45)
