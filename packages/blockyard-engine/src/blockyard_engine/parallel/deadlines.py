"""Expiry of offers and transfers, and their cleanup even after an interrupt."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from blockyard import KVCacheManager
from blockyard.arguments import require_number
from blockyard.errors import InvalidArgument, UnknownSequence


class Deadlines:
    """Keys that expire a time to live (ttl) after their start, in any unit of time: seconds, or steps.

    All have the same ttl and time never goes back, so they expire in the order of their starts: each call is O(1), and
    finding the expired keys is O(expired).
    """

    def __init__(self, ttl: object) -> None:
        self.ttl = require_number("ttl", ttl)
        if self.ttl <= 0:
            raise InvalidArgument(f"ttl is {ttl}; it must be above 0")
        self.now = -math.inf
        self._ends: OrderedDict[int, float] = OrderedDict()

    def advance(self, now: object) -> list[int]:
        """Set the time and return the expired keys in order; remove them with `end`.

        Raises `InvalidArgument` for a time before the last one.
        """
        time = require_number("now", now)
        if time < self.now:
            raise InvalidArgument(f"now is {time}; it must be at least the last time, {self.now}")
        self.now = time
        return list(takewhile(lambda key: self._ends[key] <= time, self._ends))

    def start(self, key: int) -> None:
        """Start or restart a key's time to live."""
        self._ends[key] = self.now + self.ttl
        self._ends.move_to_end(key)

    def end(self, key: int) -> None:
        """Remove a key, if it is known."""
        self._ends.pop(key, None)

    def keys(self) -> set[int]:
        """Return all keys that are not removed."""
        return set(self._ends)


def end_sequence(cache: KVCacheManager, seq: int, forget: Callable[[], object]) -> None:
    """Free a sequence and call `forget`. An interrupt is raised after both are done. O(blocks)."""
    try:
        cache.free(seq)
        forget()
    except BaseException:
        forget()
        ensure_freed(cache, seq)
        raise


def ensure_freed(cache: KVCacheManager, seq: int) -> None:
    """Free a sequence after an error or interrupt, unless it is already freed."""
    with contextlib.suppress(UnknownSequence):
        cache.free(seq)
