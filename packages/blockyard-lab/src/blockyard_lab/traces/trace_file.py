"""Reads a trace file line by line. Each walk starts from the beginning and needs the memory of the longest line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from blockyard.errors import TraceError

from ..trace import Skips, Trace, TraceRequest
from .lines import Line, LineProblem, TruncatedFile, numbered_lines


class TraceLine(NamedTuple):
    """A parsed line. `timestamp` is in the format's unit, from any origin; the rest is as in `TraceRequest`."""

    timestamp: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: NDArray[np.int64] | None = None
    token_ids: NDArray[np.int32] | None = None
    session: str = ""


class Parser(Protocol):
    """Parses the lines of one walk. It may keep state from earlier lines."""

    def row(self, line: Line) -> TraceLine | None:
        """Return the request on `line`, or None if the format has none there (a header).

        Raises:
            LineProblem: if the line cannot be used.
        """
        ...


class Format(Protocol):
    """A trace file's format.

    Attributes:
        name: as in `FORMATS`.
        units_a_second: timestamp units per second.
        hash_block_size: tokens per hash id; 0 if the format has no hash_ids.
    """

    name: str
    units_a_second: int
    hash_block_size: int

    def parser(self) -> Parser:
        """Return a parser for one walk."""
        ...


@dataclass(slots=True)
class _Clock:
    """Turns timestamps into arrivals that start at 0 and never decrease."""

    units_a_second: int
    first: float | None = None
    latest: float = 0.0

    def arrival(self, timestamp: float) -> tuple[float, bool]:
        """Return seconds since the first request, and whether `timestamp` went back (it is raised to the latest)."""
        if self.first is None:
            self.first = self.latest = timestamp
        went_back = timestamp < self.latest
        self.latest = max(self.latest, timestamp)
        return round((self.latest - self.first) / self.units_a_second, 9), went_back


class FileTrace:
    """The requests of a file, as `open_trace` returns it.

    A lenient walk counts unusable lines in `skips` by cause; a strict one raises `TraceError` at the first. A walk that
    ends without any request raises `TraceError` either way.
    """

    def __init__(self, path: Path, file_format: Format, strict: bool) -> None:
        self.name = str(path)
        self.hash_block_size = file_format.hash_block_size
        self.skips = Skips()
        self._path, self._format, self._strict = path, file_format, strict

    def __iter__(self) -> Iterator[TraceRequest]:
        skips = self.skips = Skips()
        found = False
        for request in self._requests(skips):
            found = True
            yield request
        if not found:
            text = f"{self.name} holds no readable request"
            for cause, (count, where) in skips.causes.items():
                raise TraceError(f"{text}; {skips.total} lines skipped, {count} of them for: {cause}; first: {where}")
            raise TraceError(text)

    def _requests(self, skips: Skips) -> Iterator[TraceRequest]:
        parser, clock, number = self._format.parser(), _Clock(self._format.units_a_second), 0
        try:
            for number, line in numbered_lines(self._path):
                try:
                    row = parser.row(line)
                except LineProblem as problem:
                    self._leave_out(skips, problem.cause, number, problem.text)
                    continue
                if row is not None:
                    arrival, went_back = clock.arrival(row.timestamp)
                    if went_back:
                        text = f"timestamp is {row.timestamp}; it must not be before {clock.latest}, the latest so far"
                        self._leave_out(skips, "timestamp goes back (raised to the latest)", number, text)
                    yield TraceRequest(arrival, *row[1:])
        except TruncatedFile as error:
            self._leave_out(skips, "file cut short", number + 1, str(error))

    def _leave_out(self, skips: Skips, cause: str, number: int, text: str) -> None:
        where = f"{self.name}:{number}: {text}"
        if self._strict:
            raise TraceError(where)
        skips.add(cause, where)


class FirstRequests:
    """The first `count` requests of another trace, with its name, block size and skips."""

    def __init__(self, trace: Trace, count: int) -> None:
        self.name, self.hash_block_size, self.skips = trace.name, trace.hash_block_size, Skips()
        self._trace, self._count = trace, count

    def __iter__(self) -> Iterator[TraceRequest]:
        walk = iter(self._trace)
        for _ in range(self._count):
            request = next(walk, None)
            self.skips = self._trace.skips
            if request is None:
                return
            yield request
