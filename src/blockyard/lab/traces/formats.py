"""Which format a file has: what its first usable line says, or what the caller does."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from ...errors import TraceError
from . import fields
from .block_ids import DEFAULT_BLOCK_SIZE, Bailian, Mooncake
from .lengths import Azure, BurstGPT
from .lines import (
    DETECTION_LINES,
    MAX_HASH_BLOCK_SIZE,
    CutShort,
    Line,
    LineProblem,
    csv_row,
    json_object,
    numbered_lines,
    shown,
)
from .prompts import TEXT_FIELDS, Text, TokenIds
from .reading import Format

#: Names that `format` may have, beside "auto".
FORMATS = ("mooncake", "bailian", "azure", "burstgpt", "tokens", "text")
_CSV: dict[str, type[Azure] | type[BurstGPT]] = {"azure": Azure, "burstgpt": BurstGPT}


def find_format(path: Path, wanted: str, tokenizer: str | None) -> Format:
    """The format of a file; `wanted` is one of `FORMATS` or "auto".

    Looks at no more than `DETECTION_LINES` lines, so that one damaged first line does not make a trace unreadable.
    Raises `TraceError` if there is no line at all, or none that fits.
    """
    first: tuple[int, str] | None = None
    try:
        for number, line in islice(numbered_lines(path), DETECTION_LINES):
            try:
                return _format_of(line, wanted, tokenizer)
            except LineProblem as problem:
                first = first or (number, problem.text)
    except CutShort as error:
        first = first or (1, str(error))
    if first is None:
        raise TraceError(f"{path} is empty: it has no line that is not blank")
    kinds = "of no known format" if wanted == "auto" else f"not of format {wanted!r}"
    raise TraceError(f"{path} is {kinds}: {path}:{first[0]}: {first[1]}")


def _format_of(line: Line, wanted: str, tokenizer: str | None) -> Format:
    """The format, if this line is of it. Raises `LineProblem`."""
    looks_like_json = isinstance(line, bytes) and line.startswith((b"{", b"["))
    if wanted in _CSV or (wanted == "auto" and not looks_like_json):
        return _csv_format(line, wanted)
    found = json_object(line)
    name = _json_kind(found) if wanted == "auto" else wanted
    if name == "mooncake":
        return Mooncake(_block_size(found))
    if name == "bailian":
        fields.required(found, "chat_id")
        return Bailian()
    if name == "tokens":
        fields.required(found, "token_ids")
        return TokenIds()
    if not any(field in found for field in TEXT_FIELDS):
        fields.required(found, TEXT_FIELDS[0])
    return Text(tokenizer)


def _json_kind(found: dict[str, Any]) -> str:
    for field, kind in {"chat_id": "bailian", "hash_ids": "mooncake", "token_ids": "tokens"}.items():
        if field in found:
            return kind
    if any(isinstance(found.get(field), str) for field in TEXT_FIELDS):
        return "text"
    seen = ", ".join(sorted(found)[:12])[:200]
    raise LineProblem(
        "unknown", f"the object has {seen or 'no fields'}; it must have hash_ids, chat_id, token_ids or text"
    )


def _block_size(found: dict[str, Any]) -> int:
    fields.required(found, "hash_ids")
    size = found.get("hash_block_size", DEFAULT_BLOCK_SIZE)
    return fields.integer("hash_block_size", size, 1, MAX_HASH_BLOCK_SIZE)


def _csv_format(line: Line, wanted: str) -> Format:
    header = csv_row(line)
    if len(set(header)) == len(header):
        for name, kind in _CSV.items():
            if wanted in (name, "auto") and set(kind.columns) <= set(header):
                return kind(header)
    names = [wanted] if wanted in _CSV else list(_CSV)
    columns = " or ".join(f"{name} ({', '.join(_CSV[name].columns)})" for name in names)
    raise LineProblem("unknown", f"the line is {shown(','.join(header))}; it must be JSON or the header of {columns}")
