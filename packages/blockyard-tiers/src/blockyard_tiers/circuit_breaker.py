"""Circuit breaker of a tier: decides whether a backend that failed or was slow may be used again."""

from __future__ import annotations

#: Errors in a row that open it.
MAX_ERRORS = 3
#: Seconds for which it is open at first, and at most; doubled each time that a trial fails.
FIRST_SECONDS = 0.5
MAX_SECONDS = 15.0


class CircuitBreaker:
    """Closed while the backend works; open for a while after errors in a row, and then for one trial at a time.

    It reads no clock: callers pass `now`, in seconds.
    """

    def __init__(self) -> None:
        self._num_errors = 0
        self._seconds = 0.0
        self._open_until = 0.0
        self._trial_until = 0.0

    def refuses(self, now: float) -> bool:
        """Return whether to refuse an operation now. If a trial is due, the first caller is let through. O(1)."""
        if self._seconds == 0.0:
            return False
        if now < self._open_until or now < self._trial_until:
            return True
        self._trial_until = now + self._seconds
        return False

    def is_paused(self, now: float) -> bool:
        """Return whether lookups are refused too. A lookup is never the trial. O(1)."""
        return self.is_open() and now < self._open_until

    def is_open(self) -> bool:
        """Return whether the breaker is open, also during a trial."""
        return self._seconds > 0.0

    def succeed(self) -> bool:
        """Note that an operation succeeded; return whether that closes the breaker."""
        was_open, self._num_errors, self._seconds, self._trial_until = self.is_open(), 0, 0.0, 0.0
        return was_open

    def fail(self, now: float, at_once: bool = False) -> bool:
        """Note that an operation failed, or hangs (`at_once`); return whether that opens the breaker."""
        was_open = self.is_open()
        self._num_errors += 1
        if was_open or at_once or self._num_errors >= MAX_ERRORS:
            self._seconds = min(max(2 * self._seconds, FIRST_SECONDS), MAX_SECONDS)
            self._open_until, self._trial_until = now + self._seconds, 0.0
        return self.is_open() and not was_open
