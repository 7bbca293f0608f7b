"""The waiting requests of a cache, and what each lacks: what `WaitingQueue` and `AdmissionRule` work on."""

import heapq
from collections.abc import Iterator
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvalidArgument
from ..arrays import zeros_i32
from ..face import read_int
from ..gate import Gate
from ..index.prompt import Prompt
from .lookups import Lookups
from .nodes import MOST_TOKENS, Ticket
from .prompt_tree import PromptTree

#: Most tokens of a prompt or an answer.
MAX_TOKENS: Final = int(MOST_TOKENS) - 1
MAX_TICKET: Final = 2**62
#: Tickets looked up beside those asked for, where the tree gives a bound only.
MOST_LOOKUPS: Final[i64] = 32


class RequestObserver:
    """Receives what happens to the requests of a queue; the order of admission."""

    def work_of(self, num_tokens: i64) -> float:
        """Return the seconds to compute a prompt if nothing is cached."""
        raise NotImplementedError("RequestObserver must have work_of()")

    def added(self, ticket: Ticket, work: float) -> None:
        """Note that a request waits. If it raises, nothing has changed."""
        raise NotImplementedError("RequestObserver must have added()")

    def left(self, ticket: Ticket) -> None:
        """Note that a request is about to wait no longer."""
        raise NotImplementedError("RequestObserver must have left()")

    def admitted(self, ticket: Ticket, was_oldest: bool) -> None:
        """Note that a request runs; it leaves right after. If it raises, nothing has changed."""
        raise NotImplementedError("RequestObserver must have admitted()")

    def finished(self, ticket: Ticket, now: float, blocks: vec[i32], is_over: bool) -> None:
        """Note that a turn has ended, and the blocks that its session leaves. If it raises, nothing has changed."""
        raise NotImplementedError("RequestObserver must have finished()")

    def check(self) -> None:
        """Raise `InvariantError` unless the order agrees with the requests and the pool."""
        raise NotImplementedError("RequestObserver must have check()")


class WaitingRequests:
    """The tickets of a cache's waiting requests.

    Args:
        gate: gate of the cache.
        lookups: what answers for the cache.
    """

    def __init__(self, gate: Gate, lookups: Lookups) -> None:
        self.gate = gate
        self.lookups = lookups
        self.tree = PromptTree(lookups.index, int(lookups.block_size))
        self.tickets: dict[int, Ticket] = {}
        self.running: dict[int, Ticket] = {}
        self.observer: RequestObserver | None = None
        #: (arrival, ticket) of all waiting tickets, and of some that wait no longer.
        self._arrivals: list[tuple[float, int]] = []
        self._last_ticket = 0
        lookups.index.observer = self.tree

    def watch(self, observer: RequestObserver) -> None:
        """Notify an observer from now on."""
        self.observer = observer

    def check_order(self) -> None:
        """Raise `InvariantError` unless the order of admission agrees with the requests and the pool."""
        if self.observer is not None:
            self.observer.check()

    # Arguments.

    def prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        prompt = self.lookups.prompt(token_ids, extra_keys)
        if not 1 <= prompt.num_tokens < MOST_TOKENS:
            raise InvalidArgument(f"token_ids has {prompt.num_tokens} tokens; it must have 1 to {MOST_TOKENS - 1}")
        return prompt

    def waiting(self, ticket: object) -> Ticket:
        number = read_int("ticket", ticket, 1, MAX_TICKET)
        found = self.tickets.get(int(number))
        if found is None:
            raise InvalidArgument(f"ticket is {number}; no request waits with it")
        return found

    # Tickets.

    def add(self, prompt: Prompt, num_seqs: i64, session: str | None, most: i64, arrived: float) -> int:
        """Add a waiting request; return its ticket."""
        observer = self.observer
        work = 0.0 if observer is None else observer.work_of(prompt.num_tokens)
        self._last_ticket += 1
        number = self._last_ticket
        ticket = self.tree.add(number, prompt, num_seqs)
        ticket.session = session
        ticket.max_new_tokens = most
        ticket.arrived = arrived
        try:
            self.tickets[number] = ticket
            self._note_arrival(arrived, number)
            if observer is not None:
                observer.added(ticket, work)
        except BaseException:
            self.tickets.pop(number, None)
            self.tree.remove(ticket)
            raise
        return number

    def _note_arrival(self, arrived: float, number: int) -> None:
        if len(self._arrivals) > 2 * len(self.tickets) + 16:
            self._arrivals = [(ticket.arrived, ticket.number) for ticket in self.tickets.values()]
            heapq.heapify(self._arrivals)
        else:
            heapq.heappush(self._arrivals, (arrived, number))

    def remove(self, ticket: Ticket) -> None:
        """Remove a request that waits no longer."""
        if self.observer is not None:
            self.observer.left(ticket)
        self.tree.remove(ticket)
        del self.tickets[int(ticket.number)]

    def admit(self, ticket: Ticket) -> None:
        """Move a waiting request to the running ones. If it raises, nothing has changed."""
        number = int(ticket.number)
        was_oldest = self.oldest() is ticket
        self.running[number] = ticket
        if self.observer is not None:
            try:
                self.observer.admitted(ticket, was_oldest)
            except BaseException:
                del self.running[number]
                raise
        self.remove(ticket)

    def finish(self, ticket: object, now: float, blocks: object, is_over: bool) -> None:
        """End the turn of a running request."""
        number = read_int("ticket", ticket, 1, MAX_TICKET)
        left = zeros_i32(0) if blocks is None else self.lookups.blocks_of(blocks)
        found = self.running.get(int(number))
        if found is None:
            raise InvalidArgument(f"ticket is {number}; no request was admitted with it")
        if self.observer is not None:
            self.observer.finished(found, now, left, is_over)
        del self.running[int(number)]

    # Answers.

    def measure(self, ticket: Ticket) -> None:
        """Set the numbers of a ticket to those that a lookup would find now."""
        tree = self.tree
        reached = tree.reach(ticket)
        has_pending = tree.index.num_pending > 0 and tree.num_computed(ticket) < reached
        if has_pending or not self.lookups.is_exact:
            self._look_up(ticket)
            return
        ticket.num_missing = ticket.num_tokens - reached * tree.block_size
        ticket.num_joining = 0

    def _look_up(self, ticket: Ticket) -> None:
        """Look a ticket's hit up, unless only pending blocks require it and nothing has changed since the last time."""
        version, index_version = self.lookups.version(), self.tree.index.version
        if self.lookups.is_exact and ticket.asked_index == index_version and ticket.asked_sequences == version:
            return
        hit = self.lookups.find(self.tree.prompt_of(ticket), ticket.num_seqs)
        ticket.num_missing = ticket.num_tokens - hit.num_usable * self.tree.block_size - hit.num_alike
        ticket.num_joining = max(hit.num_usable - hit.first_pending, 0) * self.tree.block_size
        ticket.asked_index = index_version
        ticket.asked_sequences = version

    def first(self, count: i64) -> list[int]:
        """Return the first tickets of `in_order`."""
        found: list[int] = []
        if count > 0:
            for ticket in self.in_order():
                found.append(int(ticket.number))
                if len(found) == count:
                    break
        return found

    def in_order(self) -> Iterator[Ticket]:
        """Yield the tickets by weight and missing tokens, fewest first.

        Where the tree gives a bound only, tickets are looked up in the order of their bounds, until one that was looked
        up lacks fewer than the next bound: at most `MOST_LOOKUPS` of them.
        """
        measured: list[tuple[int, int, Ticket]] = []
        num_lookups: i64 = 0
        tree = self.tree
        for ticket in tree.ranked():
            if self.lookups.is_exact:
                yield ticket
                continue
            bound = ticket.weight + ticket.num_tokens - tree.reach(ticket) * tree.block_size - self.lookups.most_inside
            while measured and measured[0][0] < bound:
                yield heapq.heappop(measured)[2]
            if num_lookups < MOST_LOOKUPS:
                self.measure(ticket)
                num_lookups += 1
                bound = ticket.weight + ticket.num_missing
            heapq.heappush(measured, (int(bound), int(ticket.number), ticket))
        while measured:
            yield heapq.heappop(measured)[2]

    def by_arrival(self) -> list[int]:
        """Return all tickets, the earliest arrival first. O(n * log n)."""
        ordered = [(ticket.arrived, int(ticket.number)) for ticket in self.tickets.values()]
        ordered.sort()
        return [number for _, number in ordered]

    def oldest(self) -> Ticket | None:
        arrivals = self._arrivals
        while arrivals:
            ticket = self.tickets.get(arrivals[0][1])
            if ticket is not None:
                return ticket
            heapq.heappop(arrivals)
        return None
