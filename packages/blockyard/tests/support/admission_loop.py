"""A small engine on a clock: sessions that go on after a pause, admitted by a rule on a real cache."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from blockyard import Admission, KVCacheManager
from blockyard.admission import AdmissionRule
from blockyard.config import cache_config

BLOCK_SIZE = 4
SECONDS_A_TOKEN = 0.01
#: Steps of decoding for an answer; each is a token.
ANSWER = 6


@dataclass
class Request:
    """A request that waits or runs."""

    session: str
    tokens: list[int]
    arrived: float
    ticket: int
    seq: int = 0
    left: int = ANSWER


@dataclass
class Loop:
    """An engine's loop. `waits` has (wait, bound) of each admission."""

    seed: int
    order: str
    k: float | None = 4.0
    num_sessions: int = 12
    num_blocks: int = 60
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        config = cache_config(
            **{
                "num_blocks": self.num_blocks,
                "block_size": BLOCK_SIZE,
                "max_num_seqs": 4,
                "max_model_len": 160,
                "watermark": 0.0,
                **self.more,
            }
        )
        self.cache = KVCacheManager(config)
        self.queue = self.cache.waiting()
        self.rule = AdmissionRule(self.queue, self.order, seconds=SECONDS_A_TOKEN, k=self.k)
        self.now = 0.0
        self.waiting: dict[int, Request] = {}
        self.running: list[Request] = []
        self.contexts = {str(number): [number] * 5 for number in range(self.num_sessions)}
        #: (time, session) of turns to come.
        self.turns = [(self.random.random(), session) for session in self.contexts]
        self.waits: list[tuple[float, float]] = []
        self.num_computed = 0
        self.num_turns = 0
        self.num_preempted = 0

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            self.arrive()
            self.admit()
            self.step()
            if number % 20 == 0:
                self.cache.check()

    def add(self, session: str, tokens: list[int], arrived: float) -> None:
        ticket = self.queue.add(tokens, session=session, max_new_tokens=ANSWER, arrived=arrived)
        self.waiting[ticket] = Request(session, tokens, arrived, ticket)

    def arrive(self) -> None:
        for turn in sorted(turn for turn in self.turns if turn[0] <= self.now):
            self.turns.remove(turn)
            context = self.contexts[turn[1]]
            context = context + [self.random.randrange(9) for _ in range(self.random.randint(1, 12))]
            self.add(turn[1], context if len(context) < 100 else context[:5], turn[0])
        if self.waiting and self.random.random() < 0.03:
            self.abort(self.random.choice(list(self.waiting)))

    def abort(self, ticket: int) -> None:
        self.queue.remove(ticket)
        request = self.waiting.pop(ticket)
        self.turns.append((self.now + self.random.random(), request.session))

    def admit(self) -> None:
        while self.waiting:
            ticket = self.rule.next(self.now)
            if ticket is None:
                assert self.running or self.rule.wake_at(self.now) < math.inf
                return
            request = self.waiting[ticket]
            self.waits.append((self.now - request.arrived, self.rule.lane_bound(ticket, self.now)))
            seq = self.cache.try_allocate(request.tokens)
            if isinstance(seq, Admission):
                self.waits.pop()
                return
            self.queue.admitted(ticket, self.now)
            del self.waiting[ticket]
            request.seq = seq
            self.running.append(request)

    def step(self) -> None:
        """All that run compute what they lack, or one token."""
        if not self.running:
            self.now = max(self.now + 1e-3, min([turn[0] for turn in self.turns] + [self.rule.wake_at(self.now)]))
            return
        handles = [request.seq for request in self.running]
        plan = self.cache.reserve(handles)
        num_scheduled = plan.num_scheduled.tolist()
        self.cache.commit(handles, plan.num_scheduled, [[1] if count else [-1] for count in num_scheduled])
        self.num_computed += sum(num_scheduled)
        self.now += 0.02 + SECONDS_A_TOKEN * sum(num_scheduled)
        for request, count in zip(list(self.running), num_scheduled, strict=True):
            request.left -= count > 0
            if request.left == 0 or self.cache.num_tokens(request.seq) > 150:
                self.finish(request)
        if not any(num_scheduled) or self.random.random() < 0.02:
            self.preempt()

    def finish(self, request: Request) -> None:
        is_over = self.random.random() < 0.05
        self.contexts[request.session] = self.cache.token_ids(request.seq).tolist()
        self.queue.finished(request.ticket, self.now, blocks=request.seq, is_over=is_over)
        self.cache.free(request.seq)
        self.running.remove(request)
        self.num_turns += 1
        self.turns.append((self.now + self.random.random() * 4, request.session))

    def preempt(self) -> None:
        if self.running:
            request = self.running.pop()
            self.queue.finished(request.ticket, self.now, blocks=request.seq)
            self.cache.free(request.seq)
            self.add(request.session, request.tokens, request.arrived)
            self.num_preempted += 1

    def kept_idle(self) -> int:
        """The idle blocks of all kept contexts, counted from scratch."""
        contexts = self.rule._order.contexts
        pool = self.cache._parts.kv_pool
        blocks = {
            int(block)
            for context in contexts.inside.values()
            for block, losses in zip(context.blocks, context.losses, strict=True)
            if contexts.kept.losses[block] == losses
        }
        return sum(1 for block in blocks if pool.ref_cnt[block] == 0)
