"""Hints around least recently used and the slow model of them: the same victims, on random sequences of sessions."""

from __future__ import annotations

import random
from typing import Any

import pytest

from blockyard.core.policies.layers.hinted import Hinted
from blockyard.core.policies.sessions import Sessions
from blockyard.core.policies.simple.lru import LRU
from blockyard_testing.seeds import run_seed


class HintModel:
    """Blocks, whose they are, what was said, and what goes next.

    owner: block → (session, number of the sequence), None where it is shared; missing where nobody has used it.
    idle: blocks in the order in which they became idle, as least recently used has them.
    order: when each became idle. old_since: and when its session held it no more.
    over: the sessions that are over. since: when a session that is over came to have idle blocks.
    """

    def __init__(self) -> None:
        self.owner: dict[int, Any] = {}
        self.idle: list[int] = []
        self.order: dict[int, int] = {}
        self.old_since: dict[int, int] = {}
        self.over: set[str] = set()
        self.since: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.count = 0

    def tick(self) -> int:
        self.count += 1
        return self.count

    # Sessions.

    def begin(self, session: str) -> None:
        self.set_over(session, False)
        number = self.tick()
        held = [block for block in self.order if self.of(block) == session and self.is_current(block)]
        self.old_since |= dict.fromkeys(held, number)
        self.latest[session] = number

    def forget(self, session: str) -> None:
        self.set_over(session, False)
        del self.latest[session]
        for block, owner in list(self.owner.items()):
            if owner is not None and owner[0] == session:
                self.owner[block] = None

    def set_over(self, session: str, is_over: bool) -> None:
        (self.over.add if is_over else self.over.discard)(session)

    def of(self, block: int) -> str | None:
        owner = self.owner.get(block)
        return owner[0] if owner else None

    def is_current(self, block: int) -> bool:
        owner = self.owner.get(block)
        return bool(owner) and owner[1] == self.latest[owner[0]]

    # Blocks.

    def mark(self, block: int, session: str | None, sequence: int = 0) -> None:
        """A sequence ends that used `block`: the session's of that number, or one without a session."""
        owner = self.owner.get(block, ())
        if session is None or owner is None or (owner and owner[0] != session):
            self.owner[block] = None
        elif not owner or sequence > owner[1]:
            self.owner[block] = (session, sequence)

    def insert(self, block: int) -> None:
        self.idle.append(block)
        self.order[block] = self.tick()
        self.old_since[block] = self.order[block]

    def remove(self, block: int) -> None:
        self.idle.remove(block)

    def evict(self) -> int:
        block = self.choose()
        self.remove(block)
        return block

    def choose(self) -> int:
        over = [block for block in self.idle if self.of(block) in self.over]
        if not over:
            return self.idle[0]
        first = min(over, key=lambda block: self.since[self.of(block) or ""])
        mine = [block for block in over if self.of(block) == self.of(first)]
        return min(mine, key=lambda block: (self.is_current(block), self.old_since[block], self.order[block]))


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
        self.num_by_hint = 0

    def step(self) -> None:
        self.random.choices([self.begin, self.end, self.evict, self.hint], (5, 5, 6, 4))[0]()
        over = {session for session in self.model.over if self.has_idle(session)}
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
        self.set_over(session, False)
        self.hinted.on_session_begin(slot)
        self.model.begin(session)
        self.sessions.touch(slot)
        return self.sessions.begin(slot), self.model.latest[session]

    def forget(self, slot: int) -> None:
        session = next(name for name, own in self.slots.items() if own == slot)
        self.set_over(session, False)
        self.hinted.on_session_end(slot)
        self.sessions.close(slot)
        self.model.forget(session)
        del self.slots[session]

    def set_over(self, session: str, is_over: bool) -> None:
        self.sessions.set_over(self.slots[session], is_over)
        self.hinted.on_session_change(self.sessions, self.slots[session])
        self.model.set_over(session, is_over)

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
        self.hinted.uncache(block)
        self.num_by_hint += self.hinted.num_evicted - before
        self.sessions.forget_block(block)
        self.model.owner.pop(block, None)
        self.idle.remove(block)
        self.empty.add(block)

    def hint(self) -> None:
        if self.slots:
            self.set_over(self.random.choice(sorted(self.slots)), self.random.random() < 0.6)


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
