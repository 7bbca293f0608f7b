"""A router has a book of load, the prompts in flight and a cost; it knows no sockets."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..arguments import require_str, shown
from ..errors import InvalidArgument
from .asking import Ask, Bools, Candidates, Cost, Floats, Ints
from .book import ALL, HELD, REQUESTS, UNCACHED, WAITING, Booking, LoadBook, Work, is_name
from .prefixes import Links, Prefixes
from .shares import LONGEST, Shares

_log = logging.getLogger(__name__)


class Why(NamedTuple):
    """This was known of one candidate when it was chosen or not. num_tokens: leading prompt tokens that it has."""

    replica: str
    cost: float
    is_believed: bool
    num_tokens: int
    num_gpu_tokens: int
    coming: int
    requests: int
    uncached: int
    held: int


@dataclass(slots=True)
class Choice:
    """This is where a request goes. replica: None if there is none. num_tokens: prompt tokens that it is said to have.

    order: all candidates, the best first. problem: what went wrong on the way, "" as a rule; the choice is then by load
    alone.
    """

    replica: str | None
    num_tokens: int = 0
    order: list[str] = field(default_factory=list)
    problem: str = ""
    candidates: Candidates | None = None
    costs: Floats | None = None

    @property
    def why(self) -> list[Why]:
        """Says for each candidate what was known, its load and its cost. O(candidates)."""
        known, costs = self.candidates, self.costs
        if known is None or costs is None:
            return []
        columns = (known.is_believed, known.hits, known.gpu_hits, known.coming)
        loads = (known.requests, known.uncached, known.held)
        return [
            Why(*row) for row in zip(known.names, *(each.tolist() for each in (costs, *columns, *loads)), strict=True)
        ]


class Router:
    """Chooses a replica for each request by a cost, and books what it chose. It never waits.

    Hits are told by the caller (`Fleet` takes them from KV events). shares: of tenants, where they share the replicas'
    pools. Not thread-safe.
    """

    def __init__(self, cost: Cost, shares: Shares | None = None) -> None:
        self.cost = cost
        self.shares = shares
        self.book = LoadBook()
        self.in_flight = Prefixes()
        self._links: dict[str, Links] = {}
        self._work = Work()

    @property
    def replicas(self) -> list[str]:
        """Return the names in the order of the arrays. O(replicas)."""
        return list(self.book.rows)

    def add(self, replica: str) -> None:
        """Add a replica without load. Raises `InvalidArgument` for a name that is there already. O(replicas)."""
        if require_str("replica", replica) in self.book.rows:
            raise InvalidArgument(f"replica is {replica!r}; it is there already")
        self.book.add(replica)
        self._work.add()

    def drop(self, replica: str) -> list[str]:
        """Remove a replica that is gone; return its requests, which are booked nowhere now. Unknown ones are none."""
        row = self.book.rows.get(replica) if is_name(replica) else None
        if row is None:
            return []
        lost = self.book.drop(replica)
        self._work.drop(row)
        for name in lost:
            self._links.pop(name, None)
        self.in_flight.forget(replica)
        try:
            self.cost.gone(replica)
        except Exception:
            _log.exception("the cost failed to forget a replica")
        return lost

    def choose(
        self,
        ask: Ask,
        hits: Ints,
        gpu_hits: Ints,
        is_believed: Bools,
        among: Sequence[str] | None = None,
        shunned: Iterable[str] = (),
    ) -> Choice:
        """Return a choice, which is booked. O(replicas log replicas + links), and what the cost takes. Never raises.

        hits, gpu_hits, is_believed: by replica, in the order of `replicas`; they are kept. among: the names that may
        take the request, all by default. shunned: those of them that are taken only where no other may, as
        are those at which its tenant waits longer than at others (`Shares`).
        """
        problem = ""
        if not is_name(ask.name):
            return Choice(None, problem=f"request is {shown(ask.name)}; it must be a name, which has a hash")
        try:
            among = None if among is None else [name for name in among if is_name(name)]
        except Exception:
            return Choice(None, problem=f"among is {shown(among)}; it must be names of replicas, or None")
        candidates = self._candidates(ask, hits, gpu_hits, is_believed, among)
        if not candidates.names:
            return Choice(None, problem="no replica may take the request")
        try:
            costs = np.asarray(self.cost.costs(ask, candidates), np.float64)
            if costs.shape != (len(candidates.names),) or np.isnan(costs).any():
                raise ValueError(f"costs are {costs}; one number for each of {len(candidates.names)} is needed")
        except Exception as error:
            problem = f"{type(self.cost).__name__} failed: {error!r}"
            _log.exception("the cost failed; requests go by load")
            costs = candidates.held.astype(np.float64)
        needed, waits = self._blocks_needed(ask, candidates)
        for name in shunned:
            if name in candidates.names:
                place = candidates.names.index(name)
                costs[place], waits[place] = np.inf, LONGEST
        order = np.lexsort((candidates.requests, costs, waits)).tolist()
        costs[waits > waits[order[0]]] = np.inf
        best = order[0]
        choice = Choice(
            candidates.names[best],
            int(candidates.hits[best]),
            [candidates.names[place] for place in order],
            problem,
            candidates,
            costs,
        )
        num_cached = max(int(candidates.hits[best]), int(candidates.coming[best]))
        self._put(ask, candidates.names[best], num_cached, needed[best])
        return choice

    def _blocks_needed(self, ask: Ask, candidates: Candidates) -> tuple[list[int], Ints]:
        """Return what the request would take of each candidate, and how long its tenant would wait (`Shares.wait`).

        What requests in flight there bring is taken once. O(candidates).
        """
        shares, booked, names = self.shares, self.book.blocks, candidates.names
        if shares is None or ask.tenant < 0:
            return [0] * len(names), np.zeros(len(names), np.int64)
        most = shares.num_blocks(ask.num_tokens + ask.max_tokens)
        needed = [max(most - shares.num_blocks(coming), 1) for coming in candidates.coming.tolist()]
        waits = [
            shares.wait(ask.tenant, number, booked[name, ask.tenant], booked[name, ALL])
            for name, number in zip(names, needed, strict=True)
        ]
        return needed, np.array(waits, np.int64)

    def _candidates(
        self, ask: Ask, hits: Ints, gpu_hits: Ints, is_believed: Bools, among: Sequence[str] | None
    ) -> Candidates:
        sums, rows = self.book.sums, self.book.rows
        coming = self.in_flight.lengths(ask.links, rows) * ask.link_tokens
        arrays = [hits, gpu_hits, np.minimum(coming, max(ask.num_tokens - 1, 0))]
        speeds = self._work.seconds_a_token()
        if among is None:
            names, sums, work = list(rows), sums.copy(), self._work.given.copy()
        else:
            names = [name for name in among if name in rows]
            chosen = [rows[name] for name in names]
            arrays, is_believed = [array[chosen] for array in arrays], is_believed[chosen]
            sums, work, speeds = sums[:, chosen], self._work.given[chosen], speeds[chosen]
        believed_hits, believed_gpu_hits, believed_coming = (array * is_believed for array in arrays)
        return Candidates(
            names, is_believed, believed_hits, believed_gpu_hits, believed_coming,
            sums[WAITING], sums[UNCACHED], sums[REQUESTS], sums[HELD], work, speeds,
        )  # fmt: skip

    def _put(self, ask: Ask, replica: str, num_cached: int, num_blocks: int) -> None:
        self._release(ask.name, None)
        uncached = max(ask.num_tokens - num_cached, 1)
        held = ask.num_tokens + ask.max_tokens
        self.book.put(ask.name, Booking(replica, uncached, held, True, ask.now, ask.tenant, num_blocks))
        if ask.links:
            self._links[ask.name] = ask.links
            self.in_flight.add(ask.links, replica)
        self._work.give(self.book.rows[replica], uncached)
        try:
            self.cost.sent(ask, replica)
        except Exception:
            _log.exception("the cost failed to take note of a request")

    def moved(self, request: str, replica: str) -> None:
        """Take note that another replica has a request than the one chosen. Unknown names change nothing."""
        booking = self.book.bookings.get(request) if is_name(request) and is_name(replica) else None
        if booking is None or replica not in self.book.rows or booking.replica == replica:
            return
        links = self._links.get(request, ())
        self._work.move(self.book.rows[booking.replica], self.book.rows[replica], booking.uncached)
        self.in_flight.remove(links, booking.replica)
        self.in_flight.add(links, replica)
        self.book.put(request, replace(booking, replica=replica))

    def first_token(self, request: str, now: float = 0.0) -> None:
        """Take note that the prompt of a request is computed. A second call, or an unknown name, changes nothing."""
        before = self.book.first_token(request)
        if before is not None:
            self._work.ended(self.book.rows[before.replica], before.uncached, before.since, now)

    def done(self, request: str, replica: str | None = None, now: float = 0.0) -> None:
        """Free what a request was booked with: it is completed, rejected, cancelled or lost.

        replica: where it ended, so that a late word of a refused attempt does not free the next one. A second call, or
        an unknown name, changes nothing.
        """
        booking = self._release(request, replica)
        if booking is not None:
            self._work.left(self.book.rows[booking.replica], now)

    def _release(self, request: str, replica: str | None) -> Booking | None:
        booking = self.book.free(request, replica)
        if booking is not None:
            self.in_flight.remove(self._links.pop(request, ()), booking.replica)
        return booking

    def check(self) -> None:
        """Raise `AssertionError` unless load and prompts in flight are those of the requests in the book."""
        self.book.check()
        self.in_flight.check()
        assert self._links.keys() <= self.book.bookings.keys()
        sizes: dict[str, set[object]] = {}
        for name, links in self._links.items():
            sizes.setdefault(self.book.bookings[name].replica, set()).update(links)
        assert {name: len(links) for name, links in sizes.items()} == {
            name: size for name, size in self.in_flight.sizes.items() if size
        }
        assert len(self._work.given) == len(self.book.rows)
