"""The lane: a share of the time that belongs to whoever waits longest."""

from mypy_extensions import i64

from ...errors import InvariantError
from .nodes import Ticket


class Lane:
    """Gives the oldest waiting request one part in k of the time; docs/admission.md proves the bound that this sets.

    While somebody waits, credit grows by 1/k of the time, up to the service time of the oldest request's missing
    tokens. Then that request is due. The time until it is admitted is not credited but counted as `drained`: running
    answers hold the blocks that it needs. When it is admitted it pays its service time.

    Args:
        k: one part in k; 0 for no lane.

    Attributes:
        credit: seconds of credit.
        drained: seconds while a request was due so far.
        num_admitted: requests that were admitted when they were due.
    """

    def __init__(self, k: float) -> None:
        self.k = k
        self.credit = 0.0
        self.drained = 0.0
        self.num_admitted = 0
        #: The time up to which credit was counted.
        self.counted = 0.0
        #: Seconds of the waiting requests' work, and of those that were added before others that already waited.
        self._waiting_work = 0.0
        self._late_work = 0.0
        self._latest_arrival = 0.0
        self._num_waiting: i64 = 0

    def add(self, ticket: Ticket, work: float) -> None:
        """Count a request that begins to wait; `work` is its service time if nothing is cached."""
        if self._num_waiting == 0:
            self.credit = 0.0
            self._waiting_work = 0.0
            self._latest_arrival = ticket.arrived
            self.counted = max(self.counted, ticket.arrived)
        elif ticket.arrived < self._latest_arrival:
            self._late_work += work
        self._latest_arrival = max(self._latest_arrival, ticket.arrived)
        self._num_waiting += 1
        self._waiting_work += work
        ticket.work = work
        ticket.work_ahead = self._waiting_work - self._late_work
        ticket.drained = self.drained
        ticket.entered = max(self.counted, ticket.arrived)

    def leave(self, ticket: Ticket) -> None:
        """Count a request that no longer waits."""
        self._num_waiting -= 1
        self._waiting_work -= ticket.work

    def check(self, num_waiting: i64) -> None:
        """Raise `InvariantError` unless so many requests wait."""
        if self._num_waiting != num_waiting:
            raise InvariantError(f"waiting: {num_waiting} requests wait, but the lane counts {self._num_waiting}")

    def pay(self, service: float) -> None:
        """Charge the oldest request, which is admitted."""
        if self.credit >= service:
            self.num_admitted += 1
        self.credit = max(self.credit - service, 0.0)

    def count(self, now: float, service: float) -> None:
        """Count the time up to `now`, given the service time of the oldest request."""
        passed = now - self.counted
        self.counted = now
        if self.k > 0.0:
            needed = max(service - self.credit, 0.0) * self.k
            if passed <= needed:
                self.credit += passed / self.k
            else:
                self.credit = max(self.credit, service)
                self.drained += passed - needed

    def is_due(self, service: float) -> bool:
        """Return whether the oldest request has the credit that it needs."""
        return self.k > 0.0 and self.credit >= service

    def due_at(self, service: float) -> float:
        """Return the time at which the oldest request will be due if nothing changes."""
        return self.counted + max(service - self.credit, 0.0) * self.k

    def longest_wait(self, ticket: Ticket) -> float:
        """Return the longest time for which a waiting request can have waited when credit was last counted."""
        ahead = ticket.work_ahead + self._late_work
        return (ticket.entered - ticket.arrived) + self.k * ahead + (self.drained - ticket.drained)
