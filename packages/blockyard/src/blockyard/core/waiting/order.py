"""The decisions of `AdmissionRule`."""

from collections.abc import Callable
from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...arguments import require_number
from ...errors import InvalidArgument, InvariantError
from .lane import Lane
from .nodes import MOST_TOKENS, Ticket
from .requests import RequestObserver, WaitingRequests
from .room import Context, Contexts

#: The share of the pool that "room" fills.
FULL: Final = 0.95
#: A context is kept for at most this share of the time in which the device computes as many tokens as the pool holds,
POOL_SHARE: Final = 0.5
#: and for at most this many times the time to compute it again.
COST_SHARE: Final[float] = 4.0
#: Requests from outside that are compared with the room in one call.
MOST_TRIED: Final = 32
#: The weight of a finished turn in the mean length of a context.
MEAN_SHARE: Final = 0.02


class AdmissionOrder(RequestObserver):
    """Chooses the next of the waiting requests.

    Args:
        requests: the requests.
        name: "arrival", "fewest" or "room".
        per_token: seconds per missing token, if there is no function.
        function: seconds by missing tokens and length, or None.
        k: the lane's share is 1/k; 0 for no lane.

    Attributes:
        forced: the ticket that the lane has chosen; 0 for none.
    """

    def __init__(
        self,
        requests: WaitingRequests,
        name: str,
        per_token: float,
        function: Callable[[int, int], object] | None,
        k: float,
    ) -> None:
        self.requests = requests
        self.name = name
        self._per_token = per_token
        self._function = function
        self.lane = Lane(0.0 if name == "arrival" else k)
        self.contexts: Contexts | None = Contexts(requests.lookups.pool) if name == "room" else None
        #: By running ticket, the context of its session.
        self._running: dict[int, Context | None] = {}
        #: Blocks that the answers of running requests may need.
        self._num_promised: i64 = 0
        self._mean_tokens = 0.0
        self.forced: i64 = 0
        self._generation = requests.tree.index.num_generations

    def service(self, missing: i64, num_tokens: i64) -> float:
        """Return the seconds that the device needs for the last `missing` tokens of a prompt."""
        if self._function is None:
            return self._per_token * float(missing)
        answer = require_number("seconds(missing, num_tokens)", self._function(int(missing), int(num_tokens)))
        if answer < 0.0:
            raise InvalidArgument(f"seconds({missing}, {num_tokens}) is {answer}; it must be 0 or more")
        return answer

    # Requests come and go.

    def work_of(self, num_tokens: i64) -> float:
        return self.service(num_tokens, num_tokens)

    def added(self, ticket: Ticket, work: float) -> None:
        contexts = self.contexts
        if contexts is not None and not contexts.add(ticket):
            self.requests.tree.set_weight(ticket, MOST_TOKENS)
        self.lane.add(ticket, work)
        ticket.service = work

    def left(self, ticket: Ticket) -> None:
        if self.contexts is not None:
            self.contexts.remove(ticket)
        self.lane.leave(ticket)
        if self.forced == ticket.number:
            self.forced = 0

    def admitted(self, ticket: Ticket, was_oldest: bool) -> None:
        number = int(ticket.number)
        self._running[number] = None
        if self.contexts is not None and ticket.session is not None:
            try:
                context = self.contexts.enter(ticket.session)
            except BaseException:
                del self._running[number]
                raise
            self._running[number] = context
            context.num_running += 1
            for other in context.waiting.values():
                self.requests.tree.set_weight(other, 0)
        ticket.generation = self.requests.tree.index.num_generations
        if was_oldest:
            self.lane.pay(ticket.service)
        self._num_promised += self._num_answer_blocks(ticket)

    def finished(self, ticket: Ticket, now: float, blocks: vec[i32], is_over: bool) -> None:
        contexts = self.contexts
        context = self._running.get(int(ticket.number))
        if contexts is not None and context is not None and context.num_running == 1:
            is_lost = ticket.generation != self.requests.tree.index.num_generations
            if is_over or is_lost or len(blocks) == 0:
                self._drop(contexts, context)
            else:
                contexts.keep(context, blocks, now, self._keep_seconds(ticket))
        if context is not None:
            context.num_running -= 1
        self._running.pop(int(ticket.number), None)
        self._num_promised -= self._num_answer_blocks(ticket)

    def check(self) -> None:
        self.lane.check(i64(len(self.requests.tickets)))
        promised: i64 = 0
        for ticket in self.requests.running.values():
            promised += self._num_answer_blocks(ticket)
        if promised != self._num_promised:
            raise InvariantError(f"waiting: answers take {promised} blocks, but {self._num_promised} are counted")
        if self.contexts is not None:
            self.contexts.check()

    def _keep_seconds(self, ticket: Ticket) -> float:
        """Return for how long room is kept for the context that a request leaves."""
        length = float(ticket.num_tokens + ticket.max_new_tokens)
        mean = length
        if self._mean_tokens > 0.0:
            mean = self._mean_tokens + MEAN_SHARE * (length - self._mean_tokens)
        tokens = i64(mean)
        lookups = self.requests.lookups
        turnover = float(lookups.pool.num_usable_blocks) / float(max(lookups.num_blocks(tokens), i64(1)))
        turnover *= self.service(tokens, tokens)
        again = self.service(i64(length), i64(length))
        self._mean_tokens = mean
        return min(POOL_SHARE * turnover, COST_SHARE * again)

    def _drop(self, contexts: Contexts, context: Context) -> None:
        for ticket in contexts.drop(context):
            self.requests.tree.set_weight(ticket, MOST_TOKENS)

    # Room.

    def _num_answer_blocks(self, ticket: Ticket) -> i64:
        requests = self.requests
        return requests.lookups.num_blocks(ticket.num_tokens + ticket.max_new_tokens) - requests.lookups.num_blocks(
            ticket.num_tokens
        )

    def num_open(self, contexts: Contexts) -> i64:
        """Return the blocks that are left beside running requests and kept contexts."""
        pool = self.requests.lookups.pool
        filled = i64(FULL * float(pool.num_usable_blocks))
        return filled - pool.num_used_blocks - self._num_promised - contexts.kept.num_idle

    def _fits(self, contexts: Contexts, ticket: Ticket) -> bool:
        """Return whether a ticket fits beside all that is inside. O(1) if that is clear, else O(blocks)."""
        open_blocks = self.num_open(contexts) - self._num_answer_blocks(ticket)
        if len(contexts.inside) == 0 and len(self._running) == 0:
            return True
        if self.requests.lookups.num_blocks(ticket.num_tokens) <= open_blocks:
            return True
        if open_blocks < 0:
            return False
        return self._num_taken(contexts, ticket) <= open_blocks

    def _num_taken(self, contexts: Contexts, ticket: Ticket) -> i64:
        prompt = self.requests.tree.prompt_of(ticket)
        return self.requests.lookups.num_taken(prompt, ticket.num_seqs, contexts.kept)

    def _make_room(self, contexts: Contexts, ticket: Ticket) -> None:
        """Send contexts outside until a ticket fits, those that have been idle for longest first."""
        if ticket.session is not None and ticket.session in contexts.inside:
            return
        while not self._fits(contexts, ticket):
            context = contexts.longest_idle()
            if context is None:
                return
            self._drop(contexts, context)

    # The order.

    def next(self, now: float) -> int | None:
        requests = self.requests
        oldest = requests.oldest()
        contexts = self.contexts
        if contexts is not None:
            self._expire(contexts, now)
        if oldest is None:
            return None
        if self.name == "arrival":
            return int(oldest.number)
        service = self.measured(oldest)
        self.lane.count(now, service)
        self.forced = 0
        if self.lane.is_due(service):
            self.forced = oldest.number
            if contexts is not None:
                self._make_room(contexts, oldest)
            return int(oldest.number)
        first = requests.tree.first() if requests.lookups.is_exact else None
        if first is not None and (contexts is None or first.weight == 0 or self._fits(contexts, first)):
            return int(first.number)
        for position, ticket in enumerate(requests.in_order()):
            if contexts is None or ticket.weight == 0 or self._fits(contexts, ticket):
                return int(ticket.number)
            if position == MOST_TRIED:
                break
        return None

    def measured(self, ticket: Ticket) -> float:
        self.requests.measure(ticket)
        ticket.service = self.service(ticket.num_missing, ticket.num_tokens)
        return ticket.service

    def _expire(self, contexts: Contexts, now: float) -> None:
        if self._generation != self.requests.tree.index.num_generations:
            self._generation = self.requests.tree.index.num_generations
            for context in list(contexts.inside.values()):
                if context.num_running == 0:  # its blocks can no longer be hit, also if its next turn waits
                    self._drop(contexts, context)
        expired = contexts.expired(now)
        while expired is not None:
            self._drop(contexts, expired)
            expired = contexts.expired(now)

    def first(self, count: i64) -> list[int]:
        requests = self.requests
        if self.name == "arrival":
            return requests.by_arrival()[: int(count)]
        found: list[int] = []
        oldest = requests.oldest()
        if oldest is not None and self.lane.is_due(self.measured(oldest)):
            found.append(int(oldest.number))
        if count > 0:
            for ticket in requests.in_order():
                if int(ticket.number) not in found:
                    found.append(int(ticket.number))
                if len(found) >= count:
                    break
        return found[: int(count)]
