"""A router without sockets: it tracks load and prompts in flight, and chooses by a cost."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ..arguments import require_str, shown
from ..errors import InvalidArgument
from .cost import Bools, Candidates, Cost, Floats, Ints, RouteRequest
from .load import ALL, HELD, REQUESTS, UNCACHED, WAITING, Assignment, LoadTracker, Work, is_name
from .prefixes import Links, Prefixes
from .shares import LONGEST, Shares

_log = logging.getLogger(__name__)


class CandidateScore(NamedTuple):
    """A candidate of a choice: its cost, and the hits and load that it was computed from.

    Attributes:
        replica: name of the replica.
        cost: its cost.
        is_believed: whether its events are complete and recent.
        num_tokens: leading prompt tokens that it holds.
        num_gpu_tokens: leading prompt tokens that it holds on its GPU.
        coming: leading prompt tokens that requests in flight there share with this one.
        requests: requests in flight.
        uncached: prompt tokens that they have to compute.
        held: tokens of their prompts and longest answers.
    """

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
    """The replica chosen for a request.

    Attributes:
        replica: name of the replica, None if there is none.
        num_tokens: prompt tokens that it holds, by its events.
        order: all candidates, best first.
        problem: an error during the choice, usually ""; after an error only load decided.
        candidates: the candidates as arrays.
        costs: their costs.
    """

    replica: str | None
    num_tokens: int = 0
    order: list[str] = field(default_factory=list)
    problem: str = ""
    candidates: Candidates | None = None
    costs: Floats | None = None

    @property
    def why(self) -> list[CandidateScore]:
        """Return the score of each candidate. O(candidates)."""
        known, costs = self.candidates, self.costs
        if known is None or costs is None:
            return []
        columns = (known.is_believed, known.hits, known.gpu_hits, known.coming)
        loads = (known.requests, known.uncached, known.held)
        return [
            CandidateScore(*row)
            for row in zip(known.names, *(each.tolist() for each in (costs, *columns, *loads)), strict=True)
        ]


class Router:
    """Chooses a replica for each request by a cost, and tracks the requests in flight. It never waits.

    The caller supplies the hits (`Fleet` gets them from KV events). Not thread-safe.

    Args:
        cost: cost function.
        shares: shares of the tenants, if they share the replicas' pools.
    """

    def __init__(self, cost: Cost, shares: Shares | None = None) -> None:
        self.cost = cost
        self.shares = shares
        self.load = LoadTracker()
        self.in_flight = Prefixes()
        self._links: dict[str, Links] = {}
        self._work = Work()

    @property
    def replicas(self) -> list[str]:
        """Return the names in the order of the arrays. O(replicas)."""
        return list(self.load.rows)

    def add(self, replica: str) -> None:
        """Add a replica without load. O(replicas). Raises `InvalidArgument` for a name that exists."""
        if require_str("replica", replica) in self.load.rows:
            raise InvalidArgument(f"replica is {replica!r}; a replica of this name exists")
        self.load.add(replica)
        self._work.add()

    def drop(self, replica: str) -> list[str]:
        """Remove a replica; return the names of its requests, which are then assigned nowhere.

        An unknown replica has none.
        """
        row = self.load.rows.get(replica) if is_name(replica) else None
        if row is None:
            return []
        lost = self.load.drop(replica)
        self._work.drop(row)
        for name in lost:
            self._links.pop(name, None)
        self.in_flight.forget(replica)
        try:
            self.cost.forget(replica)
        except Exception:
            _log.exception("the cost failed to forget a replica")
        return lost

    def choose(
        self,
        request: RouteRequest,
        hits: Ints,
        gpu_hits: Ints,
        is_believed: Bools,
        allowed: Sequence[str] | None = None,
        avoid: Iterable[str] = (),
    ) -> Choice:
        """Choose a replica and assign the request to it. Never raises.

        O(replicas log replicas + links), plus the cost function.

        Args:
            request: the request.
            hits: leading tokens held by each replica, in the order of `replicas`; the router keeps the array.
            gpu_hits: those on the GPU.
            is_believed: whether each replica's events are complete and recent.
            allowed: names of the replicas that may take the request; None for all.
            avoid: names of the replicas to choose only if no other may. Replicas where the tenant would wait longer
                than elsewhere (`Shares`) are treated in the same way.
        """
        problem = ""
        if not is_name(request.name):
            return Choice(None, problem=f"request is {shown(request.name)}; it must be a name, which has a hash")
        try:
            allowed = None if allowed is None else [name for name in allowed if is_name(name)]
        except Exception:
            return Choice(None, problem=f"allowed is {shown(allowed)}; it must be names of replicas, or None")
        candidates = self._candidates(request, hits, gpu_hits, is_believed, allowed)
        if not candidates.names:
            return Choice(None, problem="no replica may take the request")
        try:
            costs = np.asarray(self.cost.costs(request, candidates), np.float64)
            if costs.shape != (len(candidates.names),) or np.isnan(costs).any():
                raise ValueError(
                    f"costs are {costs}; they must be {len(candidates.names)} numbers, one for each candidate"
                )
        except Exception as error:
            problem = f"{type(self.cost).__name__} failed: {error!r}"
            _log.exception("the cost failed; only load decides")
            costs = candidates.held.astype(np.float64)
        needed, waits = self._blocks_needed(request, candidates)
        for name in avoid:
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
        self._put(request, candidates.names[best], num_cached, needed[best])
        return choice

    def _blocks_needed(self, request: RouteRequest, candidates: Candidates) -> tuple[list[int], Ints]:
        """Return the blocks that the request would need on each candidate, and its wait there (`Shares.wait`).

        O(candidates). Blocks shared with requests in flight count once.
        """
        shares, booked, names = self.shares, self.load.blocks, candidates.names
        if shares is None or request.tenant < 0:
            return [0] * len(names), np.zeros(len(names), np.int64)
        most = shares.num_blocks(request.num_tokens + request.max_tokens)
        needed = [max(most - shares.num_blocks(coming), 1) for coming in candidates.coming.tolist()]
        waits = [
            shares.wait(request.tenant, number, booked[name, request.tenant], booked[name, ALL])
            for name, number in zip(names, needed, strict=True)
        ]
        return needed, np.array(waits, np.int64)

    def _candidates(
        self, request: RouteRequest, hits: Ints, gpu_hits: Ints, is_believed: Bools, allowed: Sequence[str] | None
    ) -> Candidates:
        sums, rows = self.load.sums, self.load.rows
        coming = self.in_flight.lengths(request.links, rows) * request.link_tokens
        arrays = [hits, gpu_hits, np.minimum(coming, max(request.num_tokens - 1, 0))]
        speeds = self._work.seconds_a_token()
        if allowed is None:
            names, sums, work = list(rows), sums.copy(), self._work.given.copy()
        else:
            names = [name for name in allowed if name in rows]
            chosen = [rows[name] for name in names]
            arrays, is_believed = [array[chosen] for array in arrays], is_believed[chosen]
            sums, work, speeds = sums[:, chosen], self._work.given[chosen], speeds[chosen]
        believed_hits, believed_gpu_hits, believed_coming = (array * is_believed for array in arrays)
        return Candidates(
            names, is_believed, believed_hits, believed_gpu_hits, believed_coming,
            sums[WAITING], sums[UNCACHED], sums[REQUESTS], sums[HELD], work, speeds,
        )  # fmt: skip

    def _put(self, request: RouteRequest, replica: str, num_cached: int, num_blocks: int) -> None:
        self._release(request.name, None)
        uncached = max(request.num_tokens - num_cached, 1)
        held = request.num_tokens + request.max_tokens
        self.load.put(request.name, Assignment(replica, uncached, held, True, request.now, request.tenant, num_blocks))
        if request.links:
            self._links[request.name] = request.links
            self.in_flight.add(request.links, replica)
        self._work.assign(self.load.rows[replica], uncached)
        try:
            self.cost.record(request, replica)
        except Exception:
            _log.exception("the cost failed to record a request")

    def reassign(self, request: str, replica: str) -> None:
        """Record that another replica than the chosen one got a request. Unknown names change nothing."""
        assignment = self.load.assignments.get(request) if is_name(request) and is_name(replica) else None
        if assignment is None or replica not in self.load.rows or assignment.replica == replica:
            return
        links = self._links.get(request, ())
        self._work.move(self.load.rows[assignment.replica], self.load.rows[replica], assignment.uncached)
        self.in_flight.remove(links, assignment.replica)
        self.in_flight.add(links, replica)
        self.load.put(request, replace(assignment, replica=replica))

    def record_first_token(self, request: str, now: float = 0.0) -> None:
        """Record that a prompt is computed. A second call, or an unknown name, changes nothing."""
        before = self.load.record_first_token(request)
        if before is not None:
            self._work.record_computed(self.load.rows[before.replica], before.uncached, before.since, now)

    def finish(self, request: str, replica: str | None = None, now: float = 0.0) -> None:
        """Remove a request that completed, failed, or was rejected or cancelled.

        A second call, or an unknown name, changes nothing.

        Args:
            request: id of the request.
            replica: where it ended; if it has been reassigned since, the call does nothing.
            now: seconds on the caller's clock.
        """
        assignment = self._release(request, replica)
        if assignment is not None:
            self._work.record_end(self.load.rows[assignment.replica], now)

    def _release(self, request: str, replica: str | None) -> Assignment | None:
        assignment = self.load.free(request, replica)
        if assignment is not None:
            self.in_flight.remove(self._links.pop(request, ()), assignment.replica)
        return assignment

    def check(self) -> None:
        """Raise `AssertionError` unless load and prompts in flight equal those of the assigned requests."""
        self.load.check()
        self.in_flight.check()
        assert self._links.keys() <= self.load.assignments.keys()
        sizes: dict[str, set[object]] = {}
        for name, links in self._links.items():
            sizes.setdefault(self.load.assignments[name].replica, set()).update(links)
        assert {name: len(links) for name, links in sizes.items()} == {
            name: size for name, size in self.in_flight.sizes.items() if size
        }
        assert len(self._work.given) == len(self.load.rows)
