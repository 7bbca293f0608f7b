"""Traces of lengths and arrivals alone, in CSV: Azure's and BurstGPT's.

They say nothing of what prompts hold, so their requests have no hash_ids: no prefix can be found in them, and a
replay shows capacity and queues, not hits.

Azure: Patel et al., "Splitwise", ISCA 2024. BurstGPT: Wang et al., "BurstGPT", 2024 (arXiv 2401.17644).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from . import fields
from .lines import Line, LineProblem, csv_row, shown
from .reading import TraceLine

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


class _Csv:
    """A CSV with a header; columns may stand in any order, and more may be there."""

    name = ""
    units_a_second = 1
    hash_block_size = 0
    columns: tuple[str, ...] = ()

    def __init__(self, header: Sequence[str]) -> None:
        self._header = list(header)

    def parser(self) -> _Csv:
        """Rows do not depend on one another, so this is its own parser."""
        return self

    def row(self, line: Line) -> TraceLine | None:
        """The request on a line, None on the header. Raises `LineProblem`."""
        cells = csv_row(line)
        if cells == self._header:
            return None
        if len(cells) != len(self._header):
            text = f"the line has {len(cells)} cells; the header has {len(self._header)}"
            raise LineProblem("cells do not match the header", text)
        return self._row(dict(zip(self._header, cells, strict=True)))

    def _row(self, cells: dict[str, str]) -> TraceLine:
        raise NotImplementedError


class Azure(_Csv):
    """TIMESTAMP (date and time, UTC where it names no zone), ContextTokens, GeneratedTokens."""

    name = "azure"
    units_a_second = 10**6
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

    def _row(self, cells: dict[str, str]) -> TraceLine:
        prompt = fields.prompt_length("ContextTokens", fields.digits("ContextTokens", cells["ContextTokens"]))
        output = fields.output_length("GeneratedTokens", fields.digits("GeneratedTokens", cells["GeneratedTokens"]))
        return TraceLine(_microseconds(cells["TIMESTAMP"]), prompt, output)


class BurstGPT(_Csv):
    """Timestamp (seconds), Request tokens, Response tokens; Total tokens is checked, a Session ID kept."""

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
    """Since 1970; further digits are cut off."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise LineProblem("TIMESTAMP not a date", f"TIMESTAMP is {shown(text)}; it must be a date and time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // MICROSECOND
