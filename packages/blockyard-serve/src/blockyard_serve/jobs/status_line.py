"""A log line every few seconds of work: requests, throughput, blocks held and hits."""

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
    """Return `seconds` if it is a number of at least 0; otherwise raise `InvalidArgument`."""
    number = require_number("status_seconds", seconds)
    if number < 0:
        raise InvalidArgument(f"status_seconds is {number:g}; it must be at least 0 (0: no status line)")
    return number


class StatusLine:
    """Writes the status line, in the engine's thread. Idle time does not count as work.

    Args:
        seconds: seconds of work between two lines; 0 for none.
        now: current time.
    """

    def __init__(self, engine: Engine, seconds: float, now: float) -> None:
        self._engine = engine
        self._seconds = require_status_seconds(seconds)
        self._begin(now)

    def skip(self, seconds: float) -> None:
        """Do not count `seconds` without work. O(1)."""
        self._began += seconds

    def note(self, report: StepReport, now: float) -> None:
        """Count a step; write the line if it is due. O(1), and O(running sequences) with a line."""
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
