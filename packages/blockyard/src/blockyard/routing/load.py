"""Requests in flight and their load in tokens, by replica; measured prefill speeds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from .cost import Floats, Ints

WAITING, UNCACHED, REQUESTS, HELD = range(4)
#: Stands for all tenants in place of a tenant's number.
ALL = -2
#: Requests per replica after which earlier work counts 1 / e.
HORIZON = 350
#: Decay of the timings with each further prompt, and the fewest prompts for a speed.
MEMORY, FEWEST = 0.98, 40
#: Speeds within this factor of the fleet's median are taken as the median.
NOISE = 1.5
#: Seconds per prompt token before any prompt was timed; only ratios matter then.
ASSUMED_SECONDS = 1e-4


def is_name(value: object) -> bool:
    """Return whether `value` has a hash and so can be a name."""
    try:
        hash(value)
    except Exception:
        return False
    return True


@dataclass(slots=True)
class Assignment:
    """A request in flight on a replica.

    Attributes:
        replica: name of the replica.
        uncached: prompt tokens to compute; 0 from its first token on.
        held: tokens of the prompt and the longest answer.
        is_waiting: whether its first token is pending.
        since: time when it was assigned.
        tenant: number of its tenant; -1 if tenants do not share the pools.
        blocks: blocks it needs at its longest; 0 if tenants do not share the pools.
    """

    replica: str
    uncached: int
    held: int
    is_waiting: bool
    since: float
    tenant: int = -1
    blocks: int = 0


class LoadTracker:
    """Tracks the requests in flight by name. After every call the sums by replica equal those of the requests.

    A request is assigned once. It is removed when it completes, is rejected or cancelled, or its replica is removed,
    whichever comes first; later removals do nothing. Replicas keep the order of their addition.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.assignments: dict[str, Assignment] = {}
        #: int64 (4, replicas): WAITING, UNCACHED, REQUESTS, HELD.
        self.sums: Ints = np.zeros((4, 0), np.int64)
        #: Blocks by replica and tenant, and of all tenants under `ALL`. Zero counts are removed.
        self.blocks: Counter[tuple[str, int]] = Counter()

    def add(self, replica: str) -> None:
        """Add a replica without load. O(replicas)."""
        self.rows[replica] = len(self.rows)
        self.sums = np.hstack([self.sums, np.zeros((4, 1), np.int64)])

    def drop(self, replica: str) -> list[str]:
        """Remove a replica; return the names of its requests. O(replicas + requests)."""
        row = self.rows.pop(replica)
        self.rows = {name: number - (number > row) for name, number in self.rows.items()}
        self.sums = np.delete(self.sums, row, axis=1)
        lost = [name for name, assignment in self.assignments.items() if assignment.replica == replica]
        for name in lost:
            self._count_blocks(self.assignments.pop(name), -1)
        return lost

    def put(self, name: str, assignment: Assignment) -> None:
        """Assign a request, removing an earlier assignment of the same name. O(1)."""
        self.free(name)
        self.assignments[name] = assignment
        self._count(assignment, 1)

    def record_first_token(self, name: str) -> Assignment | None:
        """Record that a prompt is computed. Return the assignment before, or None if unknown or already recorded."""
        assignment = self.assignments.get(name) if is_name(name) else None
        if assignment is None or not assignment.is_waiting:
            return None
        before = replace(assignment)
        self._count(assignment, -1)
        assignment.uncached, assignment.is_waiting = 0, False
        self._count(assignment, 1)
        return before

    def free(self, name: str, replica: str | None = None) -> Assignment | None:
        """Remove a request, only if it is on `replica` when that is given. Return its assignment, or None. O(1)."""
        assignment = self.assignments.get(name) if is_name(name) else None
        if assignment is None or (replica is not None and not (is_name(replica) and replica == assignment.replica)):
            return None
        del self.assignments[name]
        self._count(assignment, -1)
        return assignment

    def _count(self, assignment: Assignment, sign: int) -> None:
        column = self.sums[:, self.rows[assignment.replica]]
        column += (sign * assignment.is_waiting, sign * assignment.uncached, sign, sign * assignment.held)
        self._count_blocks(assignment, sign)

    def _count_blocks(self, assignment: Assignment, sign: int) -> None:
        if assignment.blocks:
            for tenant in (assignment.tenant, ALL):
                self.blocks[assignment.replica, tenant] += sign * assignment.blocks
                if not self.blocks[assignment.replica, tenant]:
                    del self.blocks[assignment.replica, tenant]

    def check(self) -> None:
        """Raise `AssertionError` unless the sums equal those of the requests. O(replicas + requests)."""
        assert list(self.rows.values()) == list(range(len(self.rows))), self.rows
        truth, blocks = np.zeros_like(self.sums), Counter[tuple[str, int]]()
        for assignment in self.assignments.values():
            assert assignment.is_waiting or assignment.uncached == 0, assignment
            row = self.rows[assignment.replica]
            truth[:, row] += (assignment.is_waiting, assignment.uncached, 1, assignment.held)
            for tenant in (assignment.tenant, ALL):
                blocks[assignment.replica, tenant] += assignment.blocks
        assert np.array_equal(truth, self.sums), (truth, self.sums)
        assert blocks == self.blocks, (blocks, self.blocks)
        assert all(self.blocks.values()), self.blocks


class Work:
    """Prompt tokens that each replica was assigned recently, and its prefill speed, as decayed sums by row.

    A new replica starts with the mean of the others, so that it is neither flooded nor starved.
    """

    def __init__(self) -> None:
        self.given: Floats = np.zeros(0)
        #: Time when the last prompt was computed, and when the last request ended. Of the timed prompts, float64
        #: (5, replicas): number, tokens, seconds, squares of tokens, tokens times seconds.
        self._ended: Floats = np.zeros(0)
        self._left: Floats = np.zeros(0)
        self._timed: Floats = np.zeros((5, 0))
        self._speeds: Floats | None = None

    def add(self) -> None:
        """Add a replica after the others."""
        self.given = np.append(self.given, self.given.mean() if len(self.given) else 0.0)
        self._ended, self._left = np.append(self._ended, -np.inf), np.append(self._left, -np.inf)
        self._timed = np.hstack([self._timed, np.zeros((5, 1))])
        self._speeds = None

    def drop(self, row: int) -> None:
        for name in ("given", "_ended", "_left"):
            setattr(self, name, np.delete(getattr(self, name), row))
        self._timed = np.delete(self._timed, row, axis=1)
        self._speeds = None

    def assign(self, row: int, num_tokens: int) -> None:
        """Record tokens assigned to a replica. O(replicas)."""
        self.given *= 1 - 1 / (HORIZON * len(self.given))
        self.given[row] += num_tokens

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """Move assigned tokens from one replica to another."""
        self.given[source] = max(self.given[source] - num_tokens, 0.0)
        self.given[target] += num_tokens

    def record_computed(self, row: int, num_tokens: int, since: float, now: float) -> None:
        """Record a computed prompt. Prompts run one after another, so it began when the previous one ended.

        A prompt during which another request ended is not timed, because it may have waited for that request's blocks.
        """
        begin = max(since, float(self._ended[row]))
        self._ended[row] = now
        if now > begin >= self._left[row]:
            seconds = now - begin
            sample = (1, num_tokens, seconds, num_tokens * num_tokens, num_tokens * seconds)
            self._timed[:, row] = MEMORY * self._timed[:, row] + sample
            self._speeds = None

    def record_end(self, row: int, now: float) -> None:
        """Record the end of a request."""
        self._left[row] = now

    def seconds_a_token(self) -> Floats:
        """Return the seconds that one more prompt token takes on each replica: the slope of its recent prompts.

        Without enough prompts it is the fleet's median, or a constant for all.
        """
        if self._speeds is None:
            speeds = _slope(self._timed)
            usual = float(np.nanmedian(speeds)) if not np.isnan(speeds).all() else ASSUMED_SECONDS
            self._speeds = np.where((speeds < usual / NOISE) | (speeds > usual * NOISE), speeds, usual)
        return self._speeds


def _slope(sums: Floats) -> Floats:
    """Return the slope of the regression line by replica; nan if there are too few prompts."""
    count, tokens, seconds, squares, products = sums
    spread = count * squares - tokens * tokens
    is_known = (count >= FEWEST) & (spread > 0.01 * tokens * tokens)
    slopes = (count * products - tokens * seconds) / np.where(is_known, spread, 1.0)
    return np.where(is_known & (slopes > 0), slopes, np.nan)
