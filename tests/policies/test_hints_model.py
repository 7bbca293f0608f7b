"""Hints around least recently used and the slow model of them: the same victims, on random sequences of sessions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard.core.policies.layers.hinted import Hinted
from blockyard.core.policies.layers.sessions import BACK, OVER, UNKNOWN, Sessions
from blockyard.core.policies.simple.lru import LRU

from ..support.hint_model import HintModel
from ..support.seeds import run_seed

NAMES = "abcde"
MAX_SESSIONS = 4


class Walk:
    """Sequences that hold blocks, end, and leave them idle; both sides are told the same and must evict the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_blocks = self.random.choice((4, 9, 20))
        self.sessions = Sessions(self.num_blocks, MAX_SESSIONS)
        self.hinted = Hinted(LRU(self.num_blocks), self.num_blocks, self.sessions, [])
        self.model = HintModel()
        self.empty = set(range(1, self.num_blocks))
        self.idle: set[int] = set()
        self.running: list[tuple[str | None, int, int, list[int]]] = []
        self.slots: dict[str, int] = {}
        self.now = 0.0
        self.num_by_hint = 0

    def step(self) -> None:
        self.random.choices([self.begin, self.end, self.evict, self.hint, self.advance], (5, 5, 6, 4, 2))[0]()
        over = {s for s, said in self.model.said.items() if said == "over" and self.has_idle(s)}
        for session in over - set(self.model.since):
            self.model.since[session] = self.model.tick()
        self.model.since = {session: tick for session, tick in self.model.since.items() if session in over}
        self.hinted.check()

    def has_idle(self, session: str) -> bool:
        return any(self.model.of(block) == session for block in self.idle)

    def begin(self) -> None:
        """A sequence takes idle blocks, and empty ones."""
        session = self.random.choice((None, *NAMES))
        blocks = self.random.sample(sorted(self.idle), self.random.randint(0, min(3, len(self.idle))))
        for block in blocks:
            self.idle.remove(block)
            self.hinted.remove(block)
            self.model.remove(block)
        fresh = self.random.sample(sorted(self.empty), self.random.randint(0, min(3, len(self.empty))))
        self.empty -= set(fresh)
        tag = number = 0
        if session is not None:
            tag, number = self.begin_session(session)
        self.running.append((session, tag, number, blocks + fresh))

    def begin_session(self, session: str) -> tuple[int, int]:
        if session not in self.slots:
            if not self.sessions.make_room():
                self.forget(self.sessions.oldest())
            self.slots[session] = self.sessions.open()
        slot = self.slots[session]
        self.say(session, UNKNOWN, 0.0)
        self.hinted.supersede(slot)
        self.model.begin(session)
        self.sessions.hear(slot)
        return self.sessions.begin(slot), self.model.latest[session]

    def forget(self, slot: int) -> None:
        session = next(name for name, own in self.slots.items() if own == slot)
        self.say(session, UNKNOWN, 0.0)
        self.hinted.forget(slot)
        self.sessions.close(slot)
        self.model.forget(session)
        del self.slots[session]

    def say(self, session: str, state: int, back_at: float) -> None:
        self.sessions.say(self.slots[session], state, back_at)
        self.hinted.restate(self.slots[session])
        said: Any = {UNKNOWN: None, OVER: "over", BACK: back_at}[state]
        self.model.say(session, said)

    def end(self) -> None:
        if not self.running:
            return
        session, tag, number, blocks = self.running.pop(self.random.randrange(len(self.running)))
        # The session may have been forgotten, and known again, since.
        is_known = session in self.slots and self.sessions.slot_of(tag) == self.slots[session]
        for block in reversed(blocks):
            self.sessions.mark(block, tag)
            self.model.mark(block, session if is_known else None, number)
            self.hinted.insert(block, 1000 + block, 0)
            self.model.insert(block)
            self.idle.add(block)

    def evict(self) -> None:
        if not self.idle:
            return
        block = self.hinted.evict()
        assert block == self.model.evict()
        before = self.hinted.num_evicted
        self.hinted.gone(block)
        self.num_by_hint += self.hinted.num_evicted - before
        self.sessions.forget_block(block)
        self.model.owner.pop(block, None)
        self.idle.remove(block)
        self.empty.add(block)

    def hint(self) -> None:
        if self.slots:
            session = self.random.choice(sorted(self.slots))
            said = self.random.choice((UNKNOWN, OVER, BACK, BACK))
            self.say(session, said, self.now + self.random.choice((1, 5, 100)) * self.random.random())

    def advance(self) -> None:
        self.now += self.random.random()
        self.sessions.now = self.now
        while (slot := self.sessions.overdue()) >= 0:
            self.sessions.say(slot, UNKNOWN, 0.0)
            self.hinted.restate(slot)
        self.model.advance(self.now)


@pytest.mark.parametrize("number", range(60))
def test_the_same_victims_as_the_model(number: int) -> None:
    walk = Walk(run_seed() + number)
    for _ in range(600):
        walk.step()


def test_the_walks_do_what_hints_do() -> None:
    walks = [Walk(seed) for seed in range(12)]
    for walk in walks:
        for _ in range(400):
            walk.step()
    assert sum(walk.num_by_hint for walk in walks) > 30
