"""Hit-rate curves as a page of its own: one HTML file that loads nothing and needs no server."""

from __future__ import annotations

import dataclasses
import html
import os
from typing import Any

from blockyard.arguments import require_int, require_str

from ..output_file import fill_page, require_output, write_whole
from ..policy_names import OPTIMUM
from ..printing import printable, sentence
from .drawing import MAX_BYTES_PER_BLOCK
from .hit_rates import HitCurves
from .side_by_side import COLORS, label_in, styles_of
from .words import (
    capacity_axis,
    capacity_factor,
    foot_of,
    gap_of,
    infinite_of,
    knee_is_drawn,
    knee_of,
    parts_of,
    subtitle_of,
    title_of,
)


def write_page(curves: HitCurves, path: str | os.PathLike[str], *, bytes_per_block: int = 0, model: str = "") -> None:
    """Write hit rate against capacity into an .html file, with a crosshair that shows every policy's numbers.

    bytes_per_block: of a block of `curves.tokens_a_block` tokens of `model`; without it the page counts no GiB. The
    file appears whole or not at all, and the same curves give the same bytes. Without JavaScript the page is a table of
    all numbers. O(policies * sizes). Raises `InvalidArgument` for another suffix or a path that cannot be written.
    """
    found = require_output(path, (".html",))
    require_int("bytes_per_block", bytes_per_block, 0, MAX_BYTES_PER_BLOCK)
    require_str("model", model)
    write_whole(found, page_of(curves, bytes_per_block, model).encode())


def page_of(curves: HitCurves, bytes_per_block: int, model: str) -> str:
    """Return the page as text."""
    said = {
        "title": title_of(curves),
        "subtitle": subtitle_of(curves),
        "knee": " ".join(sentence(knee_of(part)) for part in parts_of(curves)),
        "infinite": " ".join(sentence(infinite_of(part)) for part in parts_of(curves)),
        "gap": gap_of(curves),
        "foot": foot_of(curves),
    }
    parts = {"head": _table_head(curves, bytes_per_block, model), "rows": _table_rows(curves, bytes_per_block)}
    return fill_page("curve", said, parts, _data_of(curves, bytes_per_block, model))


def _data_of(curves: HitCurves, bytes_per_block: int, model: str) -> dict[str, Any]:
    """Return all numbers of the curves, and the words that stand in the picture. Rates are shares, 0 to 1."""
    return {
        "trace": printable(curves.trace),
        "tokens_a_block": curves.tokens_a_block,
        "bytes_per_block": int(bytes_per_block),
        "sizes": curves.sizes.tolist(),
        "policies": _policies_of(curves),
        "infinite": [{"rate": part.infinite, "words": infinite_of(part)} for part in parts_of(curves)],
        "knees": [_knee_data(curves, part) for part in parts_of(curves)],
        "colors": len(COLORS),
        "second_axis": capacity_axis(bytes_per_block, model),
        "second_factor": capacity_factor(curves, bytes_per_block),
    }


def _knee_data(curves: HitCurves, part: HitCurves) -> dict[str, Any]:
    name = label_in(part, part.knee.policy)
    line = list(curves.hit_rates).index(name) if name in curves.hit_rates else -1
    about = {"line": line, "is_drawn": knee_is_drawn(part), "words": knee_of(part)}
    return {**dataclasses.asdict(part.knee), **about}


def _policies_of(curves: HitCurves) -> list[dict[str, Any]]:
    styles, optima = styles_of(curves), {label_in(part, OPTIMUM) for part in parts_of(curves)}
    return [
        {
            "name": printable(policy),
            "style": styles[policy],
            "is_optimum": policy in optima,
            "rates": rates.tolist(),
            "error": curves.error[policy].tolist() if policy in curves.error else None,
        }
        for policy, rates in curves.hit_rates.items()
    ]


def _table_head(curves: HitCurves, bytes_per_block: int, model: str) -> str:
    gib = [f"GiB of {printable(model)}" if model else "GiB"] if bytes_per_block else []
    names = [f"{printable(policy)} (%)" for policy in curves.hit_rates]
    return "".join(
        f'<th scope="col">{html.escape(name)}</th>' for name in ["blocks", "tokens", *gib, *names, *curves.beside]
    )


def _table_rows(curves: HitCurves, bytes_per_block: int) -> str:
    return "\n".join(_table_row(curves, number, bytes_per_block) for number in range(len(curves.sizes)))


def _table_row(curves: HitCurves, number: int, bytes_per_block: int) -> str:
    size = int(curves.sizes[number])
    cells = [f"{size * curves.tokens_a_block:,}"]
    if bytes_per_block:
        cells.append(f"{size * capacity_factor(curves, bytes_per_block):,.6g}")
    cells += [f"{100 * float(rates[number]):.3f}" for rates in curves.hit_rates.values()]
    cells += [f"{float(values[number]):,.6g}" for values in curves.beside.values()]
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{size:,}</th>{row}</tr>'
