"""Offers and transfers end: by themselves after a time to live, in the caller's time, and whatever interrupts that."""

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
    """Keys that each end a time to live (ttl) after they were started, in any unit of time: seconds, or steps.

    All live equally long and time never goes back, so the order of starts is that of ends: each call is O(1),
    and the question for what is over is O(what is over).
    """

    def __init__(self, ttl: object) -> None:
        self.ttl = require_number("ttl", ttl)
        if self.ttl <= 0:
            raise InvalidArgument(f"ttl is {ttl}; it must be above 0")
        self.now = -math.inf
        self._ends: OrderedDict[int, float] = OrderedDict()

    def advance(self, now: object) -> list[int]:
        """Set the time; the keys whose time is over, in the order of their ends. `end` forgets them.

        Raises `InvalidArgument` for a time before the last one.
        """
        time = require_number("now", now)
        if time < self.now:
            raise InvalidArgument(f"now is {time}; it was {self.now} before, and time never goes back")
        self.now = time
        return list(takewhile(lambda key: self._ends[key] <= time, self._ends))

    def start(self, key: int) -> None:
        """Start a key's time to live now, or start it again."""
        self._ends[key] = self.now + self.ttl
        self._ends.move_to_end(key)

    def end(self, key: int) -> None:
        """Forget a key, if it is known."""
        self._ends.pop(key, None)

    def keys(self) -> set[int]:
        """Return all that live."""
        return set(self._ends)


def end_sequence(cache: KVCacheManager, seq: int, forget: Callable[[], object]) -> None:
    """Free a sequence and forget what was known of it. An interrupt is raised when both are done. O(blocks)."""
    try:
        cache.free(seq)
        forget()
    except BaseException:
        forget()
        free_at_last(cache, seq)
        raise


def free_at_last(cache: KVCacheManager, seq: int) -> None:
    """Free a sequence after an error or an interrupt, unless that came when it was free already."""
    with contextlib.suppress(UnknownSequence):
        cache.free(seq)
