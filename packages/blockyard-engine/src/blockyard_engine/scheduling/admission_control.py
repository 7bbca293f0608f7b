"""The order of admission if it is not arrival: what each waiting request lacks decides (docs/admission.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from blockyard import KVCacheManager
from blockyard.admission import AdmissionRule, ServiceEstimate

from ..request import Branch

#: Priority whose requests the rule orders: that of requests without one.
RULED_PRIORITY = 0


class AdmissionControl:
    """Orders the waiting requests of priority 0 by an `AdmissionRule`, and reports starts and ends to it.

    Requests with another priority, and those that are swapped out, keep their position by priority and arrival. A
    request that waits for a tier or for another's prefix leaves the rule's queue, and starts before the rule's next
    choice once it can.

    Args:
        cache: the cache; it gets its index of waiting requests.
        order: "fewest" or "room".
        lane: whoever waits longest gets one part in `lane` of the time.
        clock: returns seconds, and never goes back.

    Attributes:
        estimate: the measured pace of steps and length of answers.
        is_holding: whether the rule admits none of the waiting requests, as of its last answer; False after a request
            has arrived or ended.
    """

    def __init__(self, cache: KVCacheManager, order: str, lane: float, clock: Callable[[], float]) -> None:
        self.queue = cache.waiting()
        self.estimate = ServiceEstimate()
        self.rule = AdmissionRule(self.queue, order, seconds=self.estimate.seconds, k=lane)
        self.clock = clock
        self.is_holding = False
        self._waiting: dict[int, Branch] = {}
        self._held_back: set[Branch] = set()

    def seconds_until_change(self) -> float:
        """Return the seconds until the rule may admit somebody although nothing else happens; 0 if it may now."""
        now = self.clock()
        return max(self.rule.wake_at(now) - now, 0.0)

    # What waits, runs and ends.

    def candidates(self, waiting: list[Branch]) -> RuledQueue:
        """Return the waiting branches, given by priority and arrival, in the order of their admission."""
        self.is_holding = False
        unruled = []
        for branch in waiting:
            if branch in self._held_back or branch.is_swapped or branch.request.priority != RULED_PRIORITY:
                unruled.append(branch)
            elif not branch.ticket:
                self._add(branch)
        unruled.sort(key=lambda branch: branch not in self._held_back)
        return RuledQueue(self, deque(unruled))

    def _add(self, branch: Branch) -> None:
        request, sampling = branch.request, branch.request.sampling
        num_seqs = 1 if request.is_forked else sampling.n
        num_left = max(sampling.max_tokens - branch.num_generated, 0)
        branch.ticket = self.queue.add(
            branch.token_ids,
            extra_keys=request.extra_keys,
            num_seqs=num_seqs,
            session=request.session,
            max_new_tokens=num_seqs * self.estimate.expected_answer(num_left),
            arrived=request.arrived,
        )
        self._waiting[branch.ticket] = branch

    def choose(self) -> Branch | None:
        """Return the branch that the rule admits next, or None if it admits nobody now."""
        ticket = self.rule.next(self.clock())
        self.is_holding = ticket is None and bool(self._waiting)
        return None if ticket is None else self._waiting[ticket]

    def first(self, count: int) -> list[Branch]:
        """Return the first branches in the rule's order, whether or not there is room for them."""
        return [self._waiting[ticket] for ticket in self.rule.order(self.clock(), count)]

    def is_held_back(self, branch: Branch) -> bool:
        """Return whether a waiting branch was passed over because it waits for a tier or a prefix."""
        return branch in self._held_back

    def hold_back(self, branch: Branch) -> None:
        """Take a branch that cannot start yet out of the rule's queue, so that it names another one."""
        self.remove(branch)
        self._held_back.add(branch)

    def is_waiting(self, branch: Branch) -> bool:
        """Return whether a branch is in the rule's queue."""
        return branch.ticket in self._waiting

    def start(self, branch: Branch) -> None:
        """Note that a branch runs now."""
        self._held_back.discard(branch)
        if not branch.ticket:
            self._add(branch)
        del self._waiting[branch.ticket]
        self.queue.admitted(branch.ticket, self.clock())

    def finish(self, branch: Branch, keeps_blocks: bool = True) -> None:
        """Note that a running branch is about to be freed, or that it was swapped out and keeps no blocks."""
        if not branch.ticket or branch.ticket in self._waiting:
            return
        if branch.finish_reason is not None:
            self.estimate.note_answer(branch.num_generated)
        self.is_holding = False
        blocks = branch.seq if keeps_blocks and branch.seq >= 0 else None
        self.queue.finished(branch.ticket, self.clock(), blocks=blocks)
        branch.ticket = 0

    def remove(self, branch: Branch) -> None:
        """Note that a branch waits no longer, or not for the rule."""
        self._held_back.discard(branch)
        if self._waiting.pop(branch.ticket, None) is not None:
            self.queue.remove(branch.ticket)
            branch.ticket = 0
            self.is_holding = False

    # Metrics.

    def num_missing_tokens(self) -> int:
        """Return the tokens that the waiting requests would compute now, shared ones for each. O(requests)."""
        return sum(self.queue.missing(ticket) for ticket in self._waiting)


class RuledQueue:
    """Yields waiting branches as an `AdmissionControl` orders them; the counterpart of `AdmissionQueue`.

    A branch that was yielded, and neither started nor was refused, is held back.
    """

    def __init__(self, control: AdmissionControl, unruled: deque[Branch]) -> None:
        self._control = control
        self._unruled = unruled
        self._is_refused = False

    def __iter__(self) -> Iterator[Branch]:
        """Yield the branches until one is refused; `refuse` may be called between two of them."""
        control = self._control
        while not self._is_refused and (branch := self._next()) is not None:
            yield branch
            if not self._is_refused and control.is_waiting(branch):
                control.hold_back(branch)

    def _next(self) -> Branch | None:
        other = self._unruled[0] if self._unruled else None
        if other is None or not self._control.is_held_back(other):
            chosen = self._control.choose()
            if chosen is not None and (other is None or chosen.order_key < other.order_key):
                return chosen
        return None if other is None else self._unruled.popleft()

    def refuse(self, _: Branch) -> None:
        """Record that the last branch does not fit now: nobody else is admitted in this step."""
        self._is_refused = True
