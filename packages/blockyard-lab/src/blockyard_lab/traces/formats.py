"""Detects a file's format, and parses the formats without block ids.

CSV of arrivals and lengths: Azure's (Patel et al., "Splitwise", ISCA 2024) and BurstGPT's (Wang et al., 2024, arXiv
2401.17644). Their requests have no hash_ids, so a replay shows capacity and queueing, but no hits.

JSONL of whole prompts: token ids, or text for a tokenizer. `timestamp` (ms; default 0), `output_length` (default 0) and
`session` are optional. A replay hashes the tokens into block ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from blockyard.errors import MissingExtra, TraceError

from . import line_fields as fields
from .block_ids import DEFAULT_BLOCK_SIZE, Bailian, Mooncake
from .lines import (
    DETECTION_LINES,
    MAX_HASH_BLOCK_SIZE,
    Line,
    LineProblem,
    TruncatedFile,
    numbered_lines,
    parse_csv_row,
    parse_json_object,
    preview,
)
from .trace_file import Format, TraceLine

#: Field names of the prompt's text.
TEXT_FIELDS = ("text", "prompt")


class TokenIds:
    """Prompts as token ids: `token_ids`, integers from 0 to 2**31 - 1."""

    name = "tokens"
    units_a_second = 1000
    hash_block_size = 0

    def parser(self) -> TokenIds:
        """Return this object, since lines do not depend on one another."""
        return self

    def row(self, line: Line) -> TraceLine:
        """Parse a line into a request.

        Raises:
            LineProblem: if the line holds no valid request.
        """
        found = fields.rename_fields(parse_json_object(line))
        tokens = fields.token_ids("token_ids", fields.required(found, "token_ids"))
        if "input_length" in found:
            length = fields.prompt_length("input_length", found["input_length"])
            if length != len(tokens):
                text = f"input_length is {length}; token_ids has {len(tokens)}"
                raise LineProblem("token_ids do not match input_length", text)
        return _row(found, tokens)


class Text:
    """Prompts as text (`text` or `prompt`). The tokenizer adds its special tokens."""

    name = "text"
    units_a_second = 1000
    hash_block_size = 0

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = load_tokenizer(tokenizer)

    def parser(self) -> Text:
        """Return this object, since lines do not depend on one another."""
        return self

    def row(self, line: Line) -> TraceLine:
        """Parse a line into a request.

        Raises:
            LineProblem: if the line holds no valid request.
        """
        found = fields.rename_fields(parse_json_object(line))
        name = next((name for name in TEXT_FIELDS if name in found), TEXT_FIELDS[0])
        text = fields.required(found, name)
        if type(text) is not str:
            raise LineProblem(f"{name} not a text", f"{name} is {preview(text)}; it must be a text")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise LineProblem("not UTF-8", f"{name} holds an unpaired surrogate, which UTF-8 cannot encode") from None
        return _row(
            found, fields.token_ids(f"token ids of {name}", list(self._tokenizer(text, verbose=False).input_ids))
        )


def _row(found: fields.Fields, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> TraceLine:
    timestamp = fields.timestamp("timestamp", found.get("timestamp", 0))
    output = fields.output_length("output_length", found.get("output_length", 0))
    return TraceLine(timestamp, len(tokens), output, None, tokens, fields.session("session", found.get("session", "")))


def load_tokenizer(folder: str | None) -> Any:
    """Load a transformers tokenizer from a local folder. Downloads nothing and runs none of the folder's code.

    Raises:
        TraceError: if the folder holds no tokenizer.
        MissingExtra: if transformers is not installed.
    """
    if folder is None:
        raise TraceError("tokenizer is None; a trace of text needs a folder with a transformers tokenizer")
    if not Path(folder).is_dir():
        raise TraceError(f"tokenizer is {folder!r}; there is no such folder")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("a trace of text needs transformers: pip install 'blockyard[engine]'") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise types of many kinds, some of them bare Exception
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TraceError(f"tokenizer is {folder!r}; no tokenizer can be loaded from it: {reason[:200]}") from error


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class _Csv:
    """A CSV file with a header. Columns may come in any order, and extra ones are ignored."""

    name = ""
    units_a_second = 1
    hash_block_size = 0
    columns: tuple[str, ...] = ()

    def __init__(self, header: Sequence[str]) -> None:
        self._header = list(header)

    def parser(self) -> _Csv:
        """Return this object, since lines do not depend on one another."""
        return self

    def row(self, line: Line) -> TraceLine | None:
        """Parse a line into a request; return None for the header.

        Raises:
            LineProblem: if the line holds no valid request.
        """
        cells = parse_csv_row(line)
        if cells == self._header:
            return None
        if len(cells) != len(self._header):
            text = f"the line has {len(cells)} cells; the header has {len(self._header)}"
            raise LineProblem("cells do not match the header", text)
        return self._row(dict(zip(self._header, cells, strict=True)))

    def _row(self, cells: dict[str, str]) -> TraceLine:
        raise NotImplementedError


class Azure(_Csv):
    """Azure's format: TIMESTAMP (date and time; UTC unless it names a zone), ContextTokens, GeneratedTokens."""

    name = "azure"
    units_a_second = 10**6
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def _row(self, cells: dict[str, str]) -> TraceLine:
        prompt = fields.prompt_length("ContextTokens", fields.digits("ContextTokens", cells["ContextTokens"]))
        output = fields.output_length("GeneratedTokens", fields.digits("GeneratedTokens", cells["GeneratedTokens"]))
        return TraceLine(_microseconds(cells["TIMESTAMP"]), prompt, output)


class BurstGPT(_Csv):
    """BurstGPT's format: Timestamp (s), Request tokens, Response tokens; optional Total tokens and Session ID."""

    name = "burstgpt"
    columns = ("Timestamp", "Request tokens", "Response tokens")

    def _row(self, cells: dict[str, str]) -> TraceLine:
        timestamp = fields.decimal("Timestamp", cells["Timestamp"])
        prompt = fields.prompt_length("Request tokens", fields.digits("Request tokens", cells["Request tokens"]))
        output = fields.output_length("Response tokens", fields.digits("Response tokens", cells["Response tokens"]))
        if "Total tokens" in cells:
            total = fields.digits("Total tokens", cells["Total tokens"])
            if total != prompt + output:
                text = f"Total tokens is {total}; request and response are {prompt} + {output}"
                raise LineProblem("Total tokens do not match", text)
        return TraceLine(timestamp, prompt, output, session=fields.session("Session ID", cells.get("Session ID", "")))


def _microseconds(text: str) -> int:
    """Return microseconds since 1970; further digits are cut off."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise LineProblem("TIMESTAMP not a date", f"TIMESTAMP is {preview(text)}; it must be a date and time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // MICROSECOND


#: Values of `format` besides "auto".
FORMATS = ("mooncake", "bailian", "azure", "burstgpt", "tokens", "text", "weka")
_CSV: dict[str, type[Azure] | type[BurstGPT]] = {"azure": Azure, "burstgpt": BurstGPT}


def find_format(path: Path, wanted: str, tokenizer: str | None) -> Format:
    """Return the format of a file. Reads at most `DETECTION_LINES` lines, so a damaged first line does no harm.

    Args:
        path: the file.
        wanted: one of `FORMATS`, or "auto".
        tokenizer: folder of the tokenizer for text.

    Raises:
        TraceError: if the file has no lines, or none that fits.
    """
    first: tuple[int, str] | None = None
    try:
        for number, line in islice(numbered_lines(path), DETECTION_LINES):
            try:
                return _format_of(line, wanted, tokenizer)
            except LineProblem as problem:
                first = first or (number, problem.text)
    except TruncatedFile as error:
        first = first or (1, str(error))
    if first is None:
        raise TraceError(f"{path} is empty: it has no line that is not blank")
    fault = "has no known format" if wanted == "auto" else f"is not in format {wanted!r}"
    raise TraceError(f"{path} {fault}: {path}:{first[0]}: {first[1]}")


def _format_of(line: Line, wanted: str, tokenizer: str | None) -> Format:
    looks_like_json = isinstance(line, bytes) and line.startswith((b"{", b"["))
    if wanted in _CSV or (wanted == "auto" and not looks_like_json):
        return _csv_format(line, wanted)
    found = parse_json_object(line)
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
    header = parse_csv_row(line)
    if len(set(header)) == len(header):
        for name, kind in _CSV.items():
            if wanted in (name, "auto") and set(kind.columns) <= set(header):
                return kind(header)
    names = [wanted] if wanted in _CSV else list(_CSV)
    columns = " or ".join(f"{name} ({', '.join(_CSV[name].columns)})" for name in names)
    raise LineProblem("unknown", f"the line is {preview(','.join(header))}; it must be JSON or the header of {columns}")
