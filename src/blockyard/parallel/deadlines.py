"""What ends by itself after a lease, in the caller's time."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import takewhile

from ..arguments import require_number
from ..errors import InvalidArgument


class Deadlines:
    """Keys that each end a lease after they were started, in any unit of time: seconds, or steps.

    All leases are equally long and time never goes back, so the order of starts is that of ends: each call is O(1),
    and the question for what is over is O(what is over).
    """

    def __init__(self, lease: object) -> None:
        self.lease = require_number("lease", lease)
        if self.lease <= 0:
            raise InvalidArgument(f"lease is {lease}; it must be above 0")
        self.now = -math.inf
        self._ends: OrderedDict[int, float] = OrderedDict()

    def advance(self, now: object) -> list[int]:
        """Set the time; the keys whose lease is over, in the order of their ends. `end` forgets them.

        Raises `InvalidArgument` for a time before the last one.
        """
        time = require_number("now", now)
        if time < self.now:
            raise InvalidArgument(f"now is {time}; it was {self.now} before, and time never goes back")
        self.now = time
        return list(takewhile(lambda key: self._ends[key] <= time, self._ends))

    def start(self, key: int) -> None:
        """Start a key's lease now, or start it again."""
        self._ends[key] = self.now + self.lease
        self._ends.move_to_end(key)

    def end(self, key: int) -> None:
        """Forget a key, if it is known."""
        self._ends.pop(key, None)

    def keys(self) -> set[int]:
        """All that live."""
        return set(self._ends)
