"""Eviction policies as a user writes them: plain Python, outside the package, compiled or not."""

from __future__ import annotations

import random

from blockyard.policies import EvictionPolicy


class MRU(EvictionPolicy):
    """The block idle shortest goes first."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.idle: dict[int, None] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        self.idle[block] = None

    def remove(self, block: int) -> None:
        del self.idle[block]

    def evict(self) -> int:
        return self.idle.popitem()[0]

    def clear(self) -> None:
        self.idle = {}


class Dice(EvictionPolicy):
    """Any idle block, from a seed. All in O(1): the last block takes the place that another leaves."""

    def __init__(self, num_blocks: int, seed: int = 1) -> None:
        super().__init__(num_blocks)
        self.dice = random.Random(seed)
        self.idle: list[int] = []
        self.place: dict[int, int] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        self.place[block] = len(self.idle)
        self.idle.append(block)

    def remove(self, block: int) -> None:
        place = self.place.pop(block)
        last = self.idle.pop()
        if last != block:
            self.idle[place] = last
            self.place[last] = place

    def evict(self) -> int:
        block = self.dice.choice(self.idle)
        self.remove(block)
        return block

    def clear(self) -> None:
        self.idle = []
        self.place = {}
