"""A line in the log every few seconds of work: what runs and waits, tokens a second, blocks held, hits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from blockyard.answers import CacheStats
from blockyard.arguments import require_number
from blockyard.errors import InvalidArgument
from blockyard_engine import StepReport

if TYPE_CHECKING:
    from blockyard_engine import Engine

_log = logging.getLogger("blockyard_serve.status")


def require_status_seconds(seconds: object) -> float:
    """Return `seconds` if it is a number of at least 0. Raises `InvalidArgument`."""
    number = require_number("status_seconds", seconds)
    if number < 0:
        raise InvalidArgument(f"status_seconds is {number:g}; it must be 0, for no line, or more")
    return number


class StatusLine:
    """Written by the engine's thread. seconds: of work, between two lines; 0 for none. now: when it begins.

    Time without work does not count, so a line says what the engine does when it has something to do.
    """

    def __init__(self, engine: Engine, seconds: float, now: float) -> None:
        self._engine = engine
        self._seconds = require_status_seconds(seconds)
        self._begin(now)

    def skip(self, seconds: float) -> None:
        """The engine had nothing to do for so long. O(1)."""
        self._began += seconds

    def note(self, report: StepReport, now: float) -> None:
        """Note that a step ended. O(1), and O(running sequences) where a line is due."""
        self._num_new += len(report.new_tokens)
        self._num_computed += report.num_tokens
        if self._seconds and now - self._began >= self._seconds:
            _log.info("%s", self._line(report, now - self._began))
            self._begin(now)

    def _begin(self, now: float) -> None:
        self._began = now
        self._num_new = self._num_computed = 0
        self._stats: CacheStats = self._engine.cache.stats()

    def _line(self, report: StepReport, elapsed: float) -> str:
        new, computed = self._num_new / elapsed, self._num_computed / elapsed
        return (
            f"{report.num_running} running, {report.num_waiting} waiting; "
            f"{new:.1f} new and {computed:.1f} computed tokens a second; "
            f"{self._engine.cache.usage:.1%} of the blocks held; {self._hits()}"
        )

    def _hits(self) -> str:
        stats = self._engine.cache.stats()
        asked = stats.num_prompt_tokens - self._stats.num_prompt_tokens
        hit = stats.num_hit_tokens - self._stats.num_hit_tokens
        return f"{hit / asked:.1%} of {asked:,} prompt tokens hit" if asked else "no prompt was looked up"
