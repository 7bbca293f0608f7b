"""Simulates a load through a router, event by event. The router knows the replicas' contents without delay."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from blockyard.arguments import require_int
from blockyard.errors import InvalidArgument
from blockyard.routing import Cost, Router, RouteRequest

from .loads import Load
from .replica import Engine, Pool, Speed, Turn, num_usable

MAX_REPLICAS, MAX_BLOCKS = 4096, 2**24


@dataclass(frozen=True, slots=True)
class Change:
    """Replicas that join or leave at a time, the oldest leaving first.

    Args:
        at: seconds since the load's start.
        added: replicas to add.
        killed: replicas to remove at once, losing their requests.
        drained: replicas to remove after they have finished their requests.
    """

    at: float
    added: int = 0
    killed: int = 0
    drained: int = 0


@dataclass(slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        num_prompt_tokens: tokens of all prompts.
        computed: prompt tokens computed, by replica, including those that left.
        first_tokens: seconds from arrival to first token, of each request.
        seconds: end of the last request.
        num_retried: requests that a killed replica lost.
        num_refused: requests that never fit.
        num_unserved: requests that arrived when there was no replica.
        assignments: (job, replica) in order of routing.
    """

    num_prompt_tokens: int = 0
    computed: dict[str, int] = field(default_factory=dict)
    first_tokens: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_retried: int = 0
    num_refused: int = 0
    num_unserved: int = 0
    assignments: list[tuple[int, str]] = field(default_factory=list)

    @property
    def num_computed(self) -> int:
        """Prompt tokens computed by all replicas, including recomputation after a kill."""
        return sum(self.computed.values())

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that was not computed."""
        return 1 - self.num_computed / max(self.num_prompt_tokens, 1)

    @property
    def balance(self) -> float:
        """Most tokens of a replica, divided by the mean. Not meaningful if replicas joined or left."""
        mean = self.num_computed / max(len(self.computed), 1)
        return max(self.computed.values()) / mean if mean else 1.0

    def first_token(self, percentile: float) -> float:
        """Return this percentile of the seconds to the first token; 0 without requests."""
        return float(np.percentile(self.first_tokens, percentile)) if self.first_tokens else 0.0


class FleetRun:
    """One load with one routing cost over simulated replicas.

    Args:
        load: the load.
        cost: the router's cost.
        num_replicas: replicas at the start.
        num_blocks: blocks of each replica.
        speed: step times.
        changes: replicas that join or leave.
    """

    def __init__(
        self,
        load: Load,
        cost: Cost,
        num_replicas: int,
        num_blocks: int,
        speed: Speed | None = None,
        changes: Sequence[Change] = (),
    ) -> None:
        require_int("num_replicas", num_replicas, 1, MAX_REPLICAS)
        self._num_blocks = require_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        self._load, self._speed = load, speed or Speed()
        self.router = Router(cost)
        self.engines: dict[str, Engine] = {}
        self.outcome = Outcome()
        self._draining: set[str] = set()
        #: (time, number, event): a turn that arrives, a replica whose engine continues, or a change.
        self._events: list[tuple[float, int, Turn | str | Change]] = []
        self._num_events = self._num_added = 0
        self._followers: dict[int, list[int]] = {}
        for _ in range(num_replicas):
            self._add()
        for change in changes:
            self._push(change.at, change)
        for number, job in enumerate(load.jobs):
            if job.after < 0:
                self._push(job.at, Turn(number, job, job.at))
            else:
                self._followers.setdefault(job.after, []).append(number)

    def run(self) -> Outcome:
        """Run to the end. Three events per request, O(log requests + its blocks) each."""
        while self.step():
            pass
        return self.outcome

    def step(self) -> bool:
        """Run the next event; return whether there was one."""
        if not self._events:
            return False
        now, _, what = heapq.heappop(self._events)
        if isinstance(what, Turn):
            self._arrive(what, now)
        elif isinstance(what, Change):
            self._change(what, now)
        elif what in self.engines and self.engines[what].next_event() <= now + 1e-9:
            self._advance(what, now)
        return True

    def _push(self, at: float, what: Turn | str | Change) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, what))

    def _arrive(self, turn: Turn, now: float) -> None:
        job, size = turn.job, self._load.block_size
        names = self.router.replicas
        if len(job.ids) > self._num_blocks or len(names) == len(self._draining):
            self.outcome.num_refused += len(job.ids) > self._num_blocks
            self.outcome.num_unserved += len(job.ids) <= self._num_blocks
            self._follow(turn.number, now)
            return
        ids = job.ids[: turn.num_prompt // size]
        usable = ids[: num_usable(turn.num_prompt, size)]
        hits = np.array([self.engines[name].pool.num_seen(usable) for name in names], np.int64) * size
        ask = RouteRequest(str(turn.number), turn.num_prompt, turn.num_left, job.session, ids, size, now)
        among = [name for name in names if name not in self._draining] if self._draining else None
        choice = self.router.choose(ask, hits, hits, np.ones(len(names), np.bool_), among)
        if choice.problem or choice.replica is None:
            raise InvalidArgument(f"the router failed: {choice.problem}")
        self.outcome.num_prompt_tokens += turn.num_prompt if turn.given == 0 else 0
        self.outcome.assignments.append((turn.number, choice.replica))
        self.engines[choice.replica].waiting.append(turn)
        self._advance(choice.replica, now)

    def _advance(self, name: str, now: float) -> None:
        engine = self.engines[name]
        computed, ended = engine.advance(max(now, engine.now))
        for turn in computed:
            self.router.record_first_token(str(turn.number), now)
            if turn.first_token == engine.now:
                self.outcome.first_tokens.append(engine.now - turn.arrived)
        for turn in ended:
            self.router.finish(str(turn.number), name, now)
            self.outcome.seconds = now
            self._follow(turn.number, now)
        self.outcome.computed[name] = engine.num_computed
        if name in self._draining and engine.is_idle():
            self._remove(name)
        elif (at := engine.next_event()) < math.inf:
            self._push(at, name)

    def _follow(self, number: int, now: float) -> None:
        for follower in self._followers.get(number, ()):
            job = self._load.jobs[follower]
            self._push(now + job.at, Turn(follower, job, now + job.at))

    def _change(self, change: Change, now: float) -> None:
        for _ in range(change.added):
            self._add()
        for name in self._oldest(change.drained):
            self._draining.add(name)
            if self.engines[name].is_idle():
                self._remove(name)
        for name in self._oldest(change.killed):
            lost = self.engines[name].die(now)
            self._remove(name)
            self.outcome.num_retried += len(lost)
            for turn in lost:
                self._push(now, turn)

    def _oldest(self, count: int) -> list[str]:
        return [name for name in self.engines if name not in self._draining][:count]

    def _add(self) -> None:
        name = f"replica-{self._num_added}"
        self._num_added += 1
        self.router.add(name)
        self.engines[name] = Engine(Pool(self._num_blocks), self._speed, self._load.block_size)
        self.outcome.computed[name] = 0

    def _remove(self, name: str) -> None:
        self._draining.discard(name)
        self.router.drop(name)
        del self.engines[name]

    def check(self) -> None:
        """Raise `AssertionError` if the router's records, the engines and their pools disagree."""
        self.router.check()
        for name, engine in self.engines.items():
            engine.pool.check()
            booked = [key for key, assignment in self.router.load.assignments.items() if assignment.replica == name]
            assert sorted(booked) == sorted(str(turn.number) for turn in engine.turns()), name
