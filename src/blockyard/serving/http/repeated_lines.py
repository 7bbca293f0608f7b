"""Warnings that any client can have written as often as it likes: one each ten seconds, with the number left out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

#: Seconds between two warnings of the same words.
SECONDS = 10.0
#: Different ones that are known at a time.
_MOST = 64


class Sparingly(logging.Filter):
    """Lets a warning pass if its words did not in the last ten seconds; all else passes. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By words: when they passed, and how many have not since.
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written. O(1)."""
        if record.levelno != logging.WARNING:
            return True
        words, now = str(record.msg), self._clock()
        last, left_out = self._passed.get(words, (-SECONDS, 0))
        if now - last < SECONDS:
            self._passed[words] = last, left_out + 1
            return False
        if len(self._passed) >= _MOST:
            self._passed.clear()
        self._passed[words] = now, 0
        if left_out:
            record.msg = f"{words} And {left_out} more since the last such line."
        return True
