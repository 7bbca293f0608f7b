"""Hints that are wrong on purpose, around least recently used."""

from __future__ import annotations

from blockyard.core.policies.layers.hinted import Hinted
from blockyard.core.policies.layers.sessions import BACK, OVER, Sessions
from blockyard.core.policies.simple.lru import LRU

from .guard_loads import NEVER, Adversary

MAX_SESSIONS = 200


class Lies(Adversary):
    """What is asked for next is said to be over, and what is never asked for again to come back soon."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.sessions = Sessions(num_blocks, MAX_SESSIONS)
        self.layer = Hinted(LRU(num_blocks), num_blocks, self.sessions, [])
        self.slots: dict[int, int] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        super().insert(block, key, depth)
        tag = self.begin(key % MAX_SESSIONS)
        self.sessions.forget_block(block)
        self.sessions.mark(block, tag)
        self.layer.insert(block, key, depth)
        self.sessions.now += 1
        slot, never = self.slots[key % MAX_SESSIONS], self.next_use[key] == NEVER
        self.sessions.say(slot, BACK if never else OVER, self.sessions.now + 3)
        self.layer.restate(slot)

    def begin(self, name: int) -> int:
        if name not in self.slots:
            assert self.sessions.make_room()
            self.layer.grow_slots()
            self.slots[name] = self.sessions.open()
        self.sessions.say(self.slots[name], 0, 0.0)
        self.layer.restate(self.slots[name])
        self.layer.supersede(self.slots[name])
        return self.sessions.begin(self.slots[name])

    def remove(self, block: int) -> None:
        super().remove(block)
        self.layer.remove(block)

    def evict(self) -> int:
        block = self.layer.evict()
        del self.content[block]
        return block

    def check(self) -> None:
        self.layer.check()

    def clear(self) -> None:
        super().clear()
        self.layer.clear()
