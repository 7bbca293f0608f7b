"""Numbered lines of a file, of bounded length, and JSON objects and CSV rows out of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from .decompression import pieces
from .limits import MAX_LINE_BYTES
from .problems import LineProblem, shown

BOM = b"\xef\xbb\xbf"


class TooLong:
    """Stands for a line of more than `MAX_LINE_BYTES`, which was passed over."""


Line = bytes | TooLong


def numbered_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """The lines that are not blank, from number 1, without their ends (LF or CRLF) and without a BOM.

    O(longest line) memory, at most `MAX_LINE_BYTES` and a piece. Raises as `pieces` does; what stands before the
    place where a file is cut short and is no whole line is not given.
    """
    for number, line in enumerate(split_lines(pieces(path)), 1):
        if isinstance(line, TooLong):
            yield number, line
            continue
        if number == 1 and line.startswith(BOM):
            line = line[len(BOM) :]
        line = line.strip()
        if line:
            yield number, line


def split_lines(chunks: Iterable[bytes]) -> Iterator[Line]:
    """Lines out of pieces that end anywhere. The last need not have an end."""
    parts: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        size += len(first)
        if size <= MAX_LINE_BYTES:
            parts.append(first)
        else:
            parts.clear()
        if rest:
            yield TooLong() if size > MAX_LINE_BYTES else b"".join(parts)
            yield from rest[:-1]
            parts, size = [rest[-1]], len(rest[-1])
    if size:
        yield TooLong() if size > MAX_LINE_BYTES else b"".join(parts)


def text_of(line: Line) -> str:
    """The line as text. Raises `LineProblem` if it is too long or not UTF-8."""
    if isinstance(line, TooLong):
        raise LineProblem("line too long", f"the line has more than {MAX_LINE_BYTES} bytes")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise LineProblem("not UTF-8", f"byte {error.start + 1} of the line is {line[error.start]:#x}, not UTF-8")


def json_object(line: Line) -> dict[str, Any]:
    """The JSON object on a line. NaN, Infinity and a key that stands twice are refused, as JSON itself says.

    Raises `LineProblem`.
    """
    text = text_of(line)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise LineProblem("not JSON", "the JSON is nested too deep") from None
    except ValueError as error:
        raise LineProblem("not JSON", f"the line is no JSON: {str(error)[:100]}; it begins {shown(text)}") from None
    if not isinstance(value, dict):
        raise LineProblem("not a JSON object", f"the line is {shown(value)}; it must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


def csv_row(line: Line) -> list[str]:
    """The cells of a line of CSV, without the blanks around them. Raises `LineProblem`."""
    text = text_of(line)
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise LineProblem("not CSV", f"the line is no CSV: {error}; it begins {shown(text)}") from None
