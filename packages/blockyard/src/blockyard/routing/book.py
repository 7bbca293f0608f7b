"""The load book has what each replica was given and has not finished, in tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from .asking import Floats, Ints

WAITING, UNCACHED, REQUESTS, HELD = range(4)
#: In place of a tenant's number.
ALL = -2
#: Requests of a replica after which what it was given before counts 1 / e.
HORIZON = 350
#: What a timed prompt still counts after the next one, and how many are needed for a speed.
MEMORY, FEWEST = 0.98, 40
#: Speeds that differ from the fleet's median by less than this factor are noise, and taken as the median.
NOISE = 1.5
#: Seconds of a prompt token until prompts were timed: only their ratio to one another counts then.
ASSUMED_SECONDS = 1e-4


def is_name(value: object) -> bool:
    """Return whether it can be a name at all; what has no hash is the name of nothing."""
    try:
        hash(value)
    except Exception:
        return False
    return True


@dataclass(slots=True)
class Booking:
    """This is a request in flight. held: tokens of prompt and answer at most. uncached: 0 from its first token on.

    tenant, blocks: whose it is, by number, and what it takes at its fullest; -1 and 0 where no tenants share the pools.
    """

    replica: str
    uncached: int
    held: int
    is_waiting: bool
    since: float
    tenant: int = -1
    blocks: int = 0


class LoadBook:
    """Has the requests in flight by name; after every call the sums by replica are those of the bookings.

    A request is booked once. It leaves the book by completion, rejection, cancellation or its replica's end, whichever
    comes first; the others then find nothing. Replicas stand in the order in which they came.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.bookings: dict[str, Booking] = {}
        #: int64 (4, replicas): WAITING, UNCACHED, REQUESTS, HELD.
        self.sums: Ints = np.zeros((4, 0), np.int64)
        #: Blocks by replica and tenant, and of all tenants under `ALL`; none are 0.
        self.blocks: Counter[tuple[str, int]] = Counter()

    def add(self, replica: str) -> None:
        """Add a replica without load. O(replicas)."""
        self.rows[replica] = len(self.rows)
        self.sums = np.hstack([self.sums, np.zeros((4, 1), np.int64)])

    def drop(self, replica: str) -> list[str]:
        """Remove a replica; return the names of the requests that were booked there. O(replicas + bookings)."""
        row = self.rows.pop(replica)
        self.rows = {name: number - (number > row) for name, number in self.rows.items()}
        self.sums = np.delete(self.sums, row, axis=1)
        lost = [name for name, booking in self.bookings.items() if booking.replica == replica]
        for name in lost:
            self._count_blocks(self.bookings.pop(name), -1)
        return lost

    def put(self, name: str, booking: Booking) -> None:
        """Book a request, which leaves the replica where it was booked before. O(1)."""
        self.free(name)
        self.bookings[name] = booking
        self._count(booking, 1)

    def first_token(self, name: str) -> Booking | None:
        """Its prompt is computed: return the booking as it was, or None where it is not booked or was told before."""
        booking = self.bookings.get(name) if is_name(name) else None
        if booking is None or not booking.is_waiting:
            return None
        before = replace(booking)
        self._count(booking, -1)
        booking.uncached, booking.is_waiting = 0, False
        self._count(booking, 1)
        return before

    def free(self, name: str, replica: str | None = None) -> Booking | None:
        """Free a request; with a replica only if it is booked there. Return what was booked, or None. O(1)."""
        booking = self.bookings.get(name) if is_name(name) else None
        if booking is None or (replica is not None and not (is_name(replica) and replica == booking.replica)):
            return None
        del self.bookings[name]
        self._count(booking, -1)
        return booking

    def _count(self, booking: Booking, sign: int) -> None:
        column = self.sums[:, self.rows[booking.replica]]
        column += (sign * booking.is_waiting, sign * booking.uncached, sign, sign * booking.held)
        self._count_blocks(booking, sign)

    def _count_blocks(self, booking: Booking, sign: int) -> None:
        if booking.blocks:
            for tenant in (booking.tenant, ALL):
                self.blocks[booking.replica, tenant] += sign * booking.blocks
                if not self.blocks[booking.replica, tenant]:
                    del self.blocks[booking.replica, tenant]

    def check(self) -> None:
        """Raise `AssertionError` unless the sums are those of the bookings. O(replicas + bookings)."""
        assert list(self.rows.values()) == list(range(len(self.rows))), self.rows
        truth, blocks = np.zeros_like(self.sums), Counter[tuple[str, int]]()
        for booking in self.bookings.values():
            assert booking.is_waiting or booking.uncached == 0, booking
            row = self.rows[booking.replica]
            truth[:, row] += (booking.is_waiting, booking.uncached, 1, booking.held)
            for tenant in (booking.tenant, ALL):
                blocks[booking.replica, tenant] += booking.blocks
        assert np.array_equal(truth, self.sums), (truth, self.sums)
        assert blocks == self.blocks, (blocks, self.blocks)
        assert all(self.blocks.values()), self.blocks


class Work:
    """Counts the prompt tokens that each replica was given of late, and how fast it computes them: decayed sums by row.

    A new replica begins with the mean of the others, so that it is neither flooded nor left out.
    """

    def __init__(self) -> None:
        self.given: Floats = np.zeros(0)
        #: When the last prompt ended and the last request left; and of the prompts that were timed, float64
        #: (5, replicas): their number, tokens, seconds, squares of tokens, tokens times seconds.
        self._ended: Floats = np.zeros(0)
        self._left: Floats = np.zeros(0)
        self._timed: Floats = np.zeros((5, 0))
        self._speeds: Floats | None = None

    def add(self) -> None:
        """Add a replica behind the others."""
        self.given = np.append(self.given, self.given.mean() if len(self.given) else 0.0)
        self._ended, self._left = np.append(self._ended, -np.inf), np.append(self._left, -np.inf)
        self._timed = np.hstack([self._timed, np.zeros((5, 1))])
        self._speeds = None

    def drop(self, row: int) -> None:
        """Remove a replica."""
        for name in ("given", "_ended", "_left"):
            setattr(self, name, np.delete(getattr(self, name), row))
        self._timed = np.delete(self._timed, row, axis=1)
        self._speeds = None

    def give(self, row: int, num_tokens: int) -> None:
        """These tokens are given to a replica. O(replicas)."""
        self.given *= 1 - 1 / (HORIZON * len(self.given))
        self.given[row] += num_tokens

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """These tokens are given to another replica than before."""
        self.given[source] = max(self.given[source] - num_tokens, 0.0)
        self.given[target] += num_tokens

    def ended(self, row: int, num_tokens: int, since: float, now: float) -> None:
        """Take note of a computed prompt. Prompts run one after another: it began when the one before it ended.

        One is not counted during which an answer ended: it may have waited for that one's blocks.
        """
        begin = max(since, float(self._ended[row]))
        self._ended[row] = now
        if now > begin >= self._left[row]:
            seconds = now - begin
            sample = (1, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
            self._timed[:, row] = MEMORY * self._timed[:, row] + sample
            self._speeds = None

    def left(self, row: int, now: float) -> None:
        """Take note that a request has ended."""
        self._left[row] = now

    def seconds_a_token(self) -> Floats:
        """Return how many seconds one more prompt token takes each replica: a line through its prompts of late.

        Where too little was seen, the fleet's, or a number that is the same for all.
        """
        if self._speeds is None:
            speeds = _slope(self._timed)
            usual = float(np.nanmedian(speeds)) if not np.isnan(speeds).all() else ASSUMED_SECONDS
            self._speeds = np.where((speeds < usual / NOISE) | (speeds > usual * NOISE), speeds, usual)
        return self._speeds


def _slope(sums: Floats) -> Floats:
    """Return the slope of the line through what was timed, by replica; nan where that says too little."""
    count, tokens, seconds, squares, products = sums
    spread = count * squares - tokens * tokens
    is_known = (count >= FEWEST) & (spread > 0.01 * tokens * tokens)
    slopes = (count * products - tokens * seconds) / np.where(is_known, spread, 1.0)
    return np.where(is_known & (slopes > 0), slopes, np.nan)
