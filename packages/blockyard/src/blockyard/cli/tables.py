"""Tables as text for people, and as CSV and JSON for programs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from .. import __version__
from .._build import build_name

#: One row: values by column.
Cells = dict[str, Any]
#: Characters per line of a table, unless two of its columns need more.
WIDTH = 120


def as_text(rows: Sequence[dict[str, str]], num_names: int = 1) -> str:
    """Return the rows as an aligned table; the first `num_names` columns are left-aligned, the others right-aligned."""
    columns = list(rows[0])
    widths = [max(len(column), *(len(row[column]) for row in rows)) for column in columns]
    lines = [dict(zip(columns, columns, strict=True)), *rows]
    return "\n".join(
        "  ".join(
            line[column].ljust(width) if place < num_names else line[column].rjust(width)
            for place, (column, width) in enumerate(zip(columns, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def as_narrow_text(rows: Sequence[dict[str, str]], num_keys: int, width: int = WIDTH) -> str:
    """Return the rows as a right-aligned table, split into several tables if it is wider than `width`.

    Each table begins with the first `num_keys` columns.
    """
    columns = list(rows[0])
    widths = {column: 2 + max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    keys = columns[:num_keys]
    parts: list[list[str]] = [[]]
    for column in columns[num_keys:]:
        if parts[-1] and sum(widths[name] for name in [*keys, *parts[-1], column]) - 2 > width:
            parts.append([])
        parts[-1].append(column)
    return "\n\n".join(as_text([{name: row[name] for name in [*keys, *part]} for row in rows], 0) for part in parts)


def as_csv(rows: Sequence[Cells]) -> str:
    """Return the rows as CSV with a header. A cell that spreadsheets would take for a formula is prefixed with '."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _harmless(value) for name, value in row.items()} for row in rows)
    return text.getvalue().rstrip("\n")


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value[:1] in {"=", "+", "-", "@"} else value


def as_json(content: Cells) -> str:
    """Return the content as JSON, with the version and the build."""
    return json.dumps({"blockyard": __version__, "build": build_name(), **content}, indent=2, allow_nan=False)
