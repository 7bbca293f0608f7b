"""Costs measured while serving: the time of an operation as a linear function of its size."""

from __future__ import annotations

#: Factor on the weight of older measurements with each new one.
_FADING = 0.9


class LinearCost:
    """A start-up time and a rate, fitted to measurements; recent ones weigh most. O(1) per call.

    Args:
        fresh_seconds: age at which measurements are discarded, so that a tier that was slow once is tried again.
    """

    def __init__(self, fresh_seconds: float = float("inf")) -> None:
        self._fresh_seconds = fresh_seconds
        self._measured_at = float("-inf")
        self._count = self._sizes = self._times = self._squares = self._products = 0.0

    def note(self, size: float, seconds: float, now: float) -> None:
        """Record that work of `size` took `seconds`."""
        self._measured_at = now
        self._count = self._count * _FADING + 1.0
        self._sizes = self._sizes * _FADING + size
        self._times = self._times * _FADING + seconds
        self._squares = self._squares * _FADING + size * size
        self._products = self._products * _FADING + size * seconds

    def seconds(self, size: float, now: float) -> float | None:
        """Return the expected time for work of `size`; None without a recent measurement."""
        if self._sizes <= 0.0 or now - self._measured_at > self._fresh_seconds:
            return None
        spread = self._count * self._squares - self._sizes * self._sizes
        rate = self._times / self._sizes
        if spread > 1e-9 * self._squares:
            fitted = (self._count * self._products - self._sizes * self._times) / spread
            rate = min(max(fitted, 0.0), rate)
        return (self._times - rate * self._sizes) / self._count + rate * size
