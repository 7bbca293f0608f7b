"""A circuit says whether a place that failed or was slow may be asked again."""

from __future__ import annotations

#: Errors in a row that open it.
MOST_ERRORS = 3
#: Seconds that it is open at first, and at most; twice as long each time that a trial fails.
FIRST_SECONDS = 0.5
MOST_SECONDS = 15.0


class Circuit:
    """Closed while all is well; open for a while after some errors in a row, and then for one trial at a time.

    It reads no clock: `now` is the caller's, in seconds.
    """

    def __init__(self) -> None:
        self._num_errors = 0
        self._seconds = 0.0
        self._open_until = 0.0
        self._trial_until = 0.0

    def refuses(self, now: float) -> bool:
        """Says whether the place is left alone now. Where a trial is due, the first who asks makes it. O(1)."""
        if self._seconds == 0.0:
            return False
        if now < self._open_until or now < self._trial_until:
            return True
        self._trial_until = now + self._seconds
        return False

    def rests(self, now: float) -> bool:
        """Says whether the place is not to be asked even a question, which is no trial. O(1)."""
        return self.is_open() and now < self._open_until

    def is_open(self) -> bool:
        """Says whether the circuit is open, also while a trial is under way."""
        return self._seconds > 0.0

    def succeeded(self) -> bool:
        """Notes that the place did what it was asked; returns whether that closes the circuit."""
        was_open, self._num_errors, self._seconds, self._trial_until = self.is_open(), 0, 0.0, 0.0
        return was_open

    def failed(self, now: float, at_once: bool = False) -> bool:
        """Notes that the place failed, or hangs (at_once); returns whether that opens the circuit."""
        was_open = self.is_open()
        self._num_errors += 1
        if was_open or at_once or self._num_errors >= MOST_ERRORS:
            self._seconds = min(max(2 * self._seconds, FIRST_SECONDS), MOST_SECONDS)
            self._open_until, self._trial_until = now + self._seconds, 0.0
        return self.is_open() and not was_open
