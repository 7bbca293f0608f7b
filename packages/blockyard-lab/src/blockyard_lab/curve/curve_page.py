"""Writes hit-rate curves as one HTML file that loads nothing and needs no server."""

from __future__ import annotations

import dataclasses
import html
import os
from typing import Any

from blockyard.arguments import require_int, require_str

from ..output_file import fill_page, require_output, write_whole
from ..policy_names import OPTIMUM
from ..printing import printable, sentence
from .captions import (
    capacity_axis,
    capacity_factor,
    foot_of,
    gap_of,
    infinite_of,
    knee_is_drawn,
    knee_of,
    subtitle_of,
    title_of,
)
from .curves import HitCurves
from .drawing import MAX_BYTES_PER_BLOCK
from .side_by_side import COLORS, line_styles_of


def write_page(curves: HitCurves, path: str | os.PathLike[str], *, bytes_per_block: int = 0, model: str = "") -> None:
    """Write hit rate against capacity to an .html file, with a crosshair that shows every policy's numbers.

    The file appears whole or not at all, and equal curves give equal bytes. Without JavaScript the page shows a table
    of all numbers. O(policies * sizes).

    Args:
        curves: the curves to show.
        path: the file.
        bytes_per_block: bytes of a block in `model`'s cache; 0 to show no GiB.
        model: name of the model.

    Raises:
        InvalidArgument: for another suffix, or a path that cannot be written.
    """
    found = require_output(path, (".html",))
    require_int("bytes_per_block", bytes_per_block, 0, MAX_BYTES_PER_BLOCK)
    require_str("model", model)
    write_whole(found, page_of(curves, bytes_per_block, model).encode())


def page_of(curves: HitCurves, bytes_per_block: int, model: str) -> str:
    captions = {
        "title": title_of(curves),
        "subtitle": subtitle_of(curves),
        "knee": " ".join(sentence(knee_of(part)) for part in curves.per_trace),
        "infinite": " ".join(sentence(infinite_of(part)) for part in curves.per_trace),
        "gap": gap_of(curves),
        "foot": foot_of(curves),
    }
    gib = [f"GiB of {printable(model)}" if model else "GiB"] if bytes_per_block else []
    names = [f"{printable(policy)} (%)" for policy in curves.hit_rates]
    heads = ["blocks", "tokens", *gib, *names, *curves.beside]
    parts = {
        "head": "".join(f'<th scope="col">{html.escape(name)}</th>' for name in heads),
        "rows": "\n".join(_table_row(curves, index, bytes_per_block) for index in range(len(curves.sizes))),
    }
    return fill_page("curve", captions, parts, _data_of(curves, bytes_per_block, model))


def _data_of(curves: HitCurves, bytes_per_block: int, model: str) -> dict[str, Any]:
    """Return all numbers and captions for the script. Rates are 0 to 1."""
    lines, knees = list(curves.hit_rates), []
    for part in curves.per_trace:
        name = part.label(part.knee.policy)
        about = {"is_drawn": knee_is_drawn(part), "words": knee_of(part)}
        line = lines.index(name) if name in lines else -1
        knees.append({**dataclasses.asdict(part.knee), "line": line, **about})
    return {
        "trace": printable(curves.trace),
        "tokens_a_block": curves.tokens_a_block,
        "bytes_per_block": int(bytes_per_block),
        "sizes": curves.sizes.tolist(),
        "policies": _policies_of(curves),
        "infinite": [{"rate": part.infinite, "words": infinite_of(part)} for part in curves.per_trace],
        "knees": knees,
        "colors": len(COLORS),
        "second_axis": capacity_axis(bytes_per_block, model),
        "second_factor": capacity_factor(curves, bytes_per_block),
    }


def _policies_of(curves: HitCurves) -> list[dict[str, Any]]:
    styles, optima = line_styles_of(curves), {part.label(OPTIMUM) for part in curves.per_trace}
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


def _table_row(curves: HitCurves, number: int, bytes_per_block: int) -> str:
    size = int(curves.sizes[number])
    cells = [f"{size * curves.tokens_a_block:,}"]
    if bytes_per_block:
        cells.append(f"{size * capacity_factor(curves, bytes_per_block):,.6g}")
    cells += [f"{100 * float(rates[number]):.3f}" for rates in curves.hit_rates.values()]
    cells += [f"{float(values[number]):,.6g}" for values in curves.beside.values()]
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{size:,}</th>{row}</tr>'
