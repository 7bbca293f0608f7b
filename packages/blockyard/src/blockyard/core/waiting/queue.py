"""`WaitingQueue`: what each waiting request would have to compute if it were admitted now."""

from ...arguments import require_bool, require_number, require_session
from ...errors import not_enough_memory
from ..face import read_int, refuse_copy, refuse_pickle, refuse_subclass
from .requests import MAX_TOKENS, WaitingRequests


class WaitingQueue:
    """The waiting requests of a cache, and what each of them lacks at every moment.

    Made by `KVCacheManager.waiting` or `BlockPool.waiting`; docs/admission.md explains it. The waiting prompts form a
    radix tree that the cache keeps up to date: a block that is cached or evicted is one step, however many requests
    wait for it. With windows, states, partial hits, or while a shared prefix is being computed, the tree only says
    which blocks a prompt finds; `missing` then looks the prompt up.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
    >>> queue = cache.waiting()
    >>> ticket = queue.add([1, 2, 3, 4, 5, 6, 7, 8, 9])
    >>> queue.missing(ticket)
    9
    >>> seq = cache.allocate([1, 2, 3, 4, 5])
    >>> queue.missing(ticket), queue.joining(ticket)
    (5, 4)
    >>> queue.remove(ticket)
    """

    def __init__(self, requests: WaitingRequests) -> None:
        #: What the rule works on; not for callers.
        self.requests: WaitingRequests = requests
        self._gate = requests.gate

    # Tickets.

    def add(
        self,
        token_ids: object,
        *,
        extra_keys: object = (),
        num_seqs: object = 1,
        session: object = None,
        max_new_tokens: object = 256,
        arrived: object = 0.0,
    ) -> int:
        """Add a waiting request. O(blocks of the prompt).

        Args:
            token_ids: the prompt, as for `allocate`.
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            num_seqs: sequences that the prompt will be forked into.
            session: name of the session that the request continues, 1 to 200 characters, or None.
            max_new_tokens: most tokens of the answer.
            arrived: time of its arrival, in seconds. A preempted request is added with its first arrival.

        Returns:
            Its ticket: a number greater than all earlier ones.

        Raises:
            InvalidArgument: if an argument is outside its limits.
            NotEnoughMemory: if the system has no memory for it.
        """
        self._gate.enter("add")
        try:
            prompt = self.requests.prompt(token_ids, extra_keys)
            count = read_int("num_seqs", num_seqs, 1, MAX_TOKENS)
            name = None if session is None else require_session("session", session)
            most = read_int("max_new_tokens", max_new_tokens, 0, MAX_TOKENS)
            time = require_number("arrived", arrived)
            try:
                return self.requests.add(prompt, count, name, most, time)
            except MemoryError as error:
                raise not_enough_memory(f"token_ids has {prompt.num_tokens} tokens; no memory to index them", error)
        finally:
            self._gate.leave_with_result()

    def remove(self, ticket: object) -> None:
        """Remove a request that waits no longer. O(blocks that no other waiting prompt has).

        Args:
            ticket: its ticket.

        Raises:
            InvalidArgument: if no request waits with this ticket.
        """
        self._gate.enter("remove")
        try:
            self.requests.remove(self.requests.waiting(ticket))
        finally:
            self._gate.leave()

    def admitted(self, ticket: object, now: object) -> None:
        """Note that a waiting request runs from now on: call it right after `allocate`. O(log n).

        Args:
            ticket: its ticket, valid until `finished`.
            now: the time in seconds.

        Raises:
            InvalidArgument: if no request waits with this ticket.
        """
        self._gate.enter("admitted")
        try:
            require_number("now", now)
            self.requests.admit(self.requests.waiting(ticket))
        finally:
            self._gate.leave()

    def finished(self, ticket: object, now: object, *, blocks: object = None, is_over: object = False) -> None:
        """Note that the turn of an admitted request ended, or was preempted: call it right before `free`. O(blocks).

        Args:
            ticket: its ticket, which is no longer valid then.
            now: the time in seconds.
            blocks: the blocks that the next turn of its session will hit: the handle of the sequence, in a pool a lease
                or the ids of blocks; None for nothing.
            is_over: True if the session does not continue.

        Raises:
            InvalidArgument: if no request was admitted with this ticket.
            UnknownSequence: if `blocks` is a sequence that has ended.
        """
        self._gate.enter("finished")
        try:
            time = require_number("now", now)
            self.requests.finish(ticket, time, blocks, require_bool("is_over", is_over))
        finally:
            self._gate.leave()

    # Answers.

    def missing(self, ticket: object) -> int:
        """Return how many tokens the request would compute if it were allocated now.

        That is the length of its prompt minus `num_cached_tokens`: tokens that a running sequence is computing, and
        that it would share, are not missing (`joining`). O(branches of the prompt); with windows, states, partial hits,
        or while blocks of its hit are being computed, O(tokens).

        Args:
            ticket: the request's ticket.

        Raises:
            InvalidArgument: if no request waits with this ticket.
        """
        self._gate.enter("missing")
        try:
            found = self.requests.waiting(ticket)
            self.requests.measure(found)
            return int(found.num_missing)
        finally:
            self._gate.leave()

    def joining(self, ticket: object) -> int:
        """Return how many tokens of the request's hit a running sequence is still computing. As `missing` in cost.

        Args:
            ticket: the request's ticket.

        Raises:
            InvalidArgument: if no request waits with this ticket.
        """
        self._gate.enter("joining")
        try:
            found = self.requests.waiting(ticket)
            self.requests.measure(found)
            return int(found.num_joining)
        finally:
            self._gate.leave()

    def first(self, count: object = 1) -> list[int]:
        """Return the waiting tickets that lack the fewest tokens, fewest first; of equals, the one added first.

        With windows, states or partial hits the tree only gives a bound of what each lacks. Requests are then looked up
        in the order of their bounds, as far as needed, at most 32 of them. O(count * log n), and O(tokens) per lookup.

        Args:
            count: number of tickets; fewer are returned if fewer wait.

        Raises:
            InvalidArgument: if `count` is outside its limits.
        """
        self._gate.enter("first")
        try:
            return self.requests.first(read_int("count", count, 0, MAX_TOKENS))
        finally:
            self._gate.leave()

    def oldest(self) -> int | None:
        """Return the waiting ticket with the earliest arrival, or None; of equals, the one added first. O(1)."""
        self._gate.enter("oldest")
        try:
            ticket = self.requests.oldest()
            return None if ticket is None else int(ticket.number)
        finally:
            self._gate.leave()

    def tickets(self) -> list[int]:
        """Return the tickets of all waiting requests, first added first. O(n)."""
        return list(self.requests.tickets)

    def __len__(self) -> int:
        return len(self.requests.tickets)

    def check(self) -> None:
        """Compare the index and the order with the cache. O(pool + blocks of all waiting prompts).

        The `check` of a manager does both, that of a pool the first.

        Raises:
            InvariantError: if they do not agree.
        """
        self._gate.enter("check")
        try:
            self.requests.tree.check()
            self.requests.check_order()
        finally:
            self._gate.leave()

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        raise refuse_subclass("WaitingQueue")

    def __copy__(self) -> "WaitingQueue":
        raise refuse_copy("a WaitingQueue", "a cache has one")

    def __deepcopy__(self, memo: object) -> "WaitingQueue":
        raise refuse_copy("a WaitingQueue", "a cache has one")

    def __reduce__(self) -> str:
        raise refuse_pickle("a WaitingQueue", "make it in the other process")
