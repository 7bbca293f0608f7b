"""Costs are measured while serving: what a piece of work takes by its size, as a line through what it took lately."""

from __future__ import annotations

#: What a measurement counts for after each later one.
_FADING = 0.9


class LinearCost:
    """A cost is a start-up and a rate, fitted to the measurements, of which recent ones count most. O(1) a call.

    fresh_seconds: older measurements are believed no longer, so that a place that was slow once is tried again.
    """

    def __init__(self, fresh_seconds: float = float("inf")) -> None:
        self._fresh_seconds = fresh_seconds
        self._measured_at = float("-inf")
        self._count = self._sizes = self._times = self._squares = self._products = 0.0

    def note(self, size: float, seconds: float, now: float) -> None:
        """Take a measurement in: work of `size` took so long."""
        self._measured_at = now
        self._count = self._count * _FADING + 1.0
        self._sizes = self._sizes * _FADING + size
        self._times = self._times * _FADING + seconds
        self._squares = self._squares * _FADING + size * size
        self._products = self._products * _FADING + size * seconds

    def seconds(self, size: float, now: float) -> float | None:
        """Returns what work of `size` will take; None while nothing fresh is known."""
        if self._sizes <= 0.0 or now - self._measured_at > self._fresh_seconds:
            return None
        spread = self._count * self._squares - self._sizes * self._sizes
        rate = self._times / self._sizes
        if spread > 1e-9 * self._squares:
            fitted = (self._count * self._products - self._sizes * self._times) / spread
            rate = min(max(fitted, 0.0), rate)
        return (self._times - rate * self._sizes) / self._count + rate * size
