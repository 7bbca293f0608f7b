"""`AdmissionRule`: which waiting request is admitted next."""

import math
from typing import Final

from ...arguments import require_number, require_str, shown
from ...errors import InvalidArgument
from ..face import read_int, refuse_copy, refuse_pickle, refuse_subclass
from .order import AdmissionOrder
from .queue import WaitingQueue
from .requests import MAX_TOKENS

ORDERS: Final = ("arrival", "fewest", "room")


class AdmissionRule:
    """Chooses the next waiting request to admit. docs/admission.md explains it.

    "arrival": the earliest first. "fewest": the fewest missing tokens first. "room": requests whose context was in use
    a moment ago come first, fewest missing tokens first; the others only if they fit beside all such contexts. "fewest"
    and "room" have a lane: one part in `k` of the time belongs to whoever waits longest, so that nobody starves.

    Args:
        queue: the waiting requests; a queue has at most one rule.
        order: "arrival", "fewest" or "room".
        seconds: device time per missing token in seconds, above 0; or a function of the missing tokens and the length
            of a prompt that returns the seconds to compute them, and grows with the missing tokens.
        k: the lane's share is 1/k of the time; 1 or more. None for no lane: then requests can wait for ever.

    Raises:
        InvalidArgument: if an argument is outside its limits, requests already wait, or the queue has a rule.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
    >>> queue = cache.waiting()
    >>> rule = AdmissionRule(queue, "fewest", seconds=1e-4)
    >>> long, short = queue.add(range(40), arrived=1.0), queue.add(range(8), arrived=1.0)
    >>> rule.next(1.0) == short
    True
    """

    def __init__(self, queue: object, order: object = "room", *, seconds: object, k: object = 4.0) -> None:
        if not isinstance(queue, WaitingQueue):
            raise InvalidArgument(f"queue is {shown(queue)}; it must be a WaitingQueue (cache.waiting())")
        name = require_str("order", order)
        if name not in ORDERS:
            raise InvalidArgument(f"order is {shown(name)}; it must be one of {', '.join(ORDERS)}")
        share = 0.0 if k is None else require_number("k", k)
        if k is not None and share < 1.0:
            raise InvalidArgument(f"k is {share}; it must be 1 or more, or None for no lane")
        function = seconds if callable(seconds) else None
        per_token = 0.0 if function is not None else require_number("seconds", seconds)
        if function is None and per_token <= 0.0:
            raise InvalidArgument(f"seconds is {per_token}; it must be above 0, or a function")
        requests = queue.requests
        if requests.observer is not None or requests.tickets or requests.running:
            raise InvalidArgument("queue has a rule, or requests, already; make the rule first, and one for each cache")
        self._gate = requests.gate
        self._requests = requests
        self._order = AdmissionOrder(requests, name, per_token, function, share)
        requests.watch(self._order)

    def next(self, now: object) -> int | None:
        """Return the ticket to admit next, or None to admit nobody now. O(log n), and lookups where `missing` has them.

        Call it while a step has room for more tokens, and `WaitingQueue.admitted` after each admission. If the request
        does not fit, admit nobody else in this step: the lane may have chosen it.

        Args:
            now: the time in seconds; at least that of the last call.

        Raises:
            InvalidArgument: if `now` is before the last call's time.
        """
        self._gate.enter("next")
        try:
            return self._order.next(self._time(now))
        finally:
            self._gate.leave()

    def _time(self, now: object) -> float:
        time = require_number("now", now)
        last = self._order.lane.counted
        if time < last and self._requests.tickets:
            raise InvalidArgument(f"now is {time}; it must be at least {last}, the time of the last call or arrival")
        return time

    def order(self, now: object, count: object) -> list[int]:
        """Return the first tickets, as `next` would name them if each fitted. O(count * log n).

        Args:
            now: the time in seconds.
            count: number of tickets; fewer are returned if fewer wait.
        """
        self._gate.enter("order")
        try:
            self._time(now)
            most = read_int("count", count, 0, MAX_TOKENS)
            return self._order.first(most)
        finally:
            self._gate.leave()

    def wake_at(self, now: object) -> float:
        """Return the time at which `next` may change without a call of the cache or the queue; `math.inf` for never.

        Args:
            now: the time in seconds; at least that of the last call of `next`.
        """
        self._gate.enter("wake_at")
        try:
            time = self._time(now)
            oldest = self._requests.oldest()
            if oldest is None or self._order.name == "arrival":
                return math.inf
            wakes = math.inf
            if self._order.lane.k > 0.0 and int(self._order.forced) != oldest.number:
                wakes = self._order.lane.due_at(self._order.measured(oldest))
            end = None if self._order.contexts is None else self._order.contexts.next_end()
            if end is not None:
                wakes = min(wakes, end)
            return max(wakes, time)
        finally:
            self._gate.leave()

    def lane_bound(self, ticket: object, now: object) -> float:
        """Return the longest time for which a request can have waited by `now`; `math.inf` without a lane.

        It is `k * A + drain`. A is the service time, as if nothing were cached, of the requests that were ahead of
        it, and its own; drain is the time while the lane's choice did not fit yet. `now - arrived` never exceeds it
        after `next(now)`.

        Args:
            ticket: ticket of a waiting request.
            now: the time of the last call of `next`.

        Raises:
            InvalidArgument: if no request waits with this ticket.
        """
        self._gate.enter("lane_bound")
        try:
            self._time(now)
            found = self._requests.waiting(ticket)
            return self._order.lane.longest_wait(found) if self._order.lane.k > 0.0 else math.inf
        finally:
            self._gate.leave()

    @property
    def credit(self) -> float:
        """Seconds of credit of the lane. O(1)."""
        return self._order.lane.credit

    @property
    def num_lane(self) -> int:
        """Requests that were admitted when the lane had the credit for them. O(1)."""
        return self._order.lane.num_admitted

    @property
    def num_inside(self) -> int:
        """Sessions whose context is running, or was a moment ago; 0 unless the order is "room". O(1)."""
        return 0 if self._order.contexts is None else len(self._order.contexts.inside)

    @property
    def num_open_blocks(self) -> int:
        """Blocks left for requests from outside; below 0 if there are too few. 0 unless the order is "room". O(1)."""
        return 0 if self._order.contexts is None else int(self._order.num_open(self._order.contexts))

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        raise refuse_subclass("AdmissionRule")

    def __copy__(self) -> "AdmissionRule":
        raise refuse_copy("an AdmissionRule", "a queue has one")

    def __deepcopy__(self, memo: object) -> "AdmissionRule":
        raise refuse_copy("an AdmissionRule", "a queue has one")

    def __reduce__(self) -> str:
        raise refuse_pickle("an AdmissionRule", "make it in the other process")
