# ruff: noqa: ARG002
"""The order of admission by name, over the manager's own queue of waiting requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.errors import InvalidArgument

ORDERS = ("arrival",)
DEFAULT_K = 4.0


def parse_admission(text: str) -> tuple[str, float]:
    """Return order and k of a name such as "arrival".

    Raises:
        InvalidArgument: for an unknown order or an invalid k.
    """
    name, colon, _ = text.partition(":")
    if name not in ORDERS or colon:
        raise InvalidArgument(f"admission is {text!r}; it must be one of {', '.join(ORDERS)}")
    return name, DEFAULT_K


class AdmissionOrder:
    """Waiting requests in order of arrival."""

    def __init__(self, cache: KVCacheManager, admission: str, seconds: Callable[[int, int], float]) -> None:
        self.name, self.k = parse_admission(admission)
        self._heap: list[tuple[float, int]] = []
        self._num_tickets = 0

    def add(self, tokens: NDArray[np.int32], session: str, max_new_tokens: int, arrived: float) -> int:
        """Let a request wait, and return its ticket."""
        self._num_tickets += 1
        heapq.heappush(self._heap, (arrived, self._num_tickets))
        return self._num_tickets

    def next(self, now: float) -> int | None:
        """Return the ticket to admit next, or None to admit nobody now."""
        return self._heap[0][1] if self._heap else None

    def lane_bound(self, ticket: int, now: float) -> float:
        """Return the longest time that this request may have waited; inf without a bound."""
        return math.inf

    def admitted(self, ticket: int, now: float) -> None:
        """Record that a request runs."""
        heapq.heappop(self._heap)

    def finished(self, ticket: int, now: float, seq: int, is_over: bool) -> None:
        """Record that a running request ends, just before its sequence is freed."""

    def wake_at(self, now: float) -> float:
        """Return when `next` may change although nothing happens."""
        return math.inf
