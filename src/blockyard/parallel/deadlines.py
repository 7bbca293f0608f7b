"""What ends by itself after a lease: a heap of deadlines in the caller's time."""

from __future__ import annotations

import heapq
import math

from ..arguments import require_number
from ..errors import InvalidArgument


class Deadlines:
    """Keys that each end a lease after they were started, in any unit of time: seconds, or steps.

    Entries of keys that ended early stay in the heap until it is twice as long as what lives, so that a start, a
    renewal and an end cost O(log n) on average.
    """

    def __init__(self, lease: object) -> None:
        self.lease = require_number("lease", lease)
        if self.lease <= 0:
            raise InvalidArgument(f"lease is {lease}; it must be above 0")
        self.now = -math.inf
        self._ends: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def require_time(self, now: object) -> float:
        """`now` as a number that is not before the last one."""
        time = require_number("now", now)
        if time < self.now:
            raise InvalidArgument(f"now is {time}; it was {self.now} before, and time never goes back")
        return time

    def advance(self, now: object) -> list[int]:
        """Set the time; the keys whose lease is over, in the order in which they ended. They are forgotten."""
        self.now = self.require_time(now)
        ended = []
        while self._heap and self._heap[0][0] <= self.now:
            end, key = heapq.heappop(self._heap)
            if self._ends.get(key) == end:
                del self._ends[key]
                ended.append(key)
        return ended

    def start(self, key: int) -> float:
        """Start a key's lease now, or start it again; returns when it ends."""
        end = self.now + self.lease
        self._ends[key] = end
        heapq.heappush(self._heap, (end, key))
        if len(self._heap) > 2 * len(self._ends) + 16:
            self._heap = [(each, kept) for kept, each in self._ends.items()]
            heapq.heapify(self._heap)
        return end

    def end(self, key: int) -> None:
        """Forget a key."""
        self._ends.pop(key, None)

    def of(self, key: int) -> float:
        """When a key's lease ends."""
        return self._ends[key]

    def keys(self) -> set[int]:
        """All that live."""
        return set(self._ends)
