"""Random legal events for an eviction policy: all that a pool may tell it, in any order that a pool could."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from blockyard.core.policies.base import EvictionPolicy
from blockyard.core.policies.layers.retention import Retention

#: Keys are below 2**62, and both ends occur; in density's memory those two share a row.
KEYS = [0, 2**62 - 1, *random.Random(0).sample(range(2**62 - 1), 30)]
#: Three contents, so that most come back at once and many blocks hold the same.
FEW_KEYS = [0, 2**62 - 1, *[3553260803050964941] * 30]


class Stream:
    """Blocks that are idle, held or empty, and a policy that is told what becomes of them; `step()` does one thing.

    With a model (`policy_models`) both are told the same and must evict the same block. Contents come back after their
    eviction, in the same block or another one, and two blocks may hold the same.
    """

    def __init__(
        self, policy: EvictionPolicy, num_blocks: int, seed: int, model: Any = None, keys: list[int] | None = None
    ) -> None:
        self.policy = policy
        self.keys = keys or KEYS
        self.model = model
        self.random = random.Random(seed)
        self.num_blocks = num_blocks
        self.content: dict[int, int] = {}
        self.idle: set[int] = set()
        self.held: set[int] = set()
        self.now = 0.0
        self.evicted: list[int] = []
        self.counts: Counter[str] = Counter()
        self.actions = {
            self.cache: 6.0,
            self.release: 5.0,
            self.revive: 4.0,
            self.hit_held: 2.0,
            self.evict: 4.0,
            self.lose: 0.5,
            self.drop_out: 0.5,
            self.grow: 0.2,
            self.clear: 0.2,
        }
        if isinstance(policy, Retention):
            self.actions |= {self.wish: 4.0, self.advance: 1.0}

    def step(self) -> None:
        """One event that is possible now, and the policy's structures are sound after it."""
        while True:
            action = self.random.choices(list(self.actions), list(self.actions.values()))[0]
            if action():
                break
        self.counts[action.__name__] += 1
        self.policy.check()

    def tell(self, method: str, *arguments: int) -> None:
        getattr(self.policy, method)(*arguments)
        if self.model is not None:
            getattr(self.model, method)(*arguments)

    def _pick(self, blocks: set[int]) -> int:
        return self.random.choice(sorted(blocks)) if blocks else 0

    def _insert(self, block: int) -> None:
        self.idle.add(block)
        self.tell("insert", block, self.content[block], self.random.randrange(5))

    # The events. Each returns whether it was possible.

    def cache(self) -> bool:
        """An empty block gets a content and is held, or idle at once."""
        block = self._pick(set(range(1, self.num_blocks)) - self.idle - self.held)
        if block:
            self.content[block] = self.random.choice(self.keys)
            if self.random.random() < 0.4:
                self.held.add(block)
            else:
                self._insert(block)
        return block != 0

    def release(self) -> bool:
        block = self._pick(self.held)
        if block:
            self.held.remove(block)
            self._insert(block)
        return block != 0

    def revive(self) -> bool:
        """A prompt hits an idle block; now and then somebody takes it without a hit."""
        block = self._pick(self.idle)
        if block:
            if self.random.random() < 0.8:
                self.tell("hit", block, self.content[block])
            self.tell("remove", block)
            self.idle.remove(block)
            self.held.add(block)
        return block != 0

    def hit_held(self) -> bool:
        block = self._pick(self.held)
        if block:
            self.tell("hit", block, self.content[block])
        return block != 0

    def lose(self) -> bool:
        """A held block is written to: its content is gone."""
        block = self._pick(self.held)
        self.held.discard(block)
        self._forget(block)
        return block != 0

    def _forget(self, block: int) -> None:
        if block:
            self.tell("uncache", block)

    def drop_out(self) -> bool:
        """An idle block goes because the pool shrinks."""
        block = self._pick(self.idle)
        if block:
            self.tell("remove", block)
            self.idle.remove(block)
            self._forget(block)
        return block != 0

    def evict(self) -> bool:
        if not self.idle:
            return False
        victim = self.policy.evict()
        assert victim in self.idle
        self.idle.remove(victim)
        self.evicted.append(victim)
        if self.model is not None:
            assert victim == self.model.evict()
        return True

    def grow(self) -> bool:
        if self.num_blocks >= 40:
            return False
        self.num_blocks += self.random.randrange(1, 5)
        self.tell("grow", self.num_blocks)
        return True

    def clear(self) -> bool:
        """Reset: idle blocks are empty, held ones stay held without a content."""
        self.tell("clear")
        self.idle = set()
        self.held = set()
        return True

    # Retention.

    def wish(self) -> bool:
        block = self._pick(self.idle | self.held)
        if block == 0:
            return False
        priority = self.random.choice([0, 1, 1, 2, 3, 2**20])
        expires_at = self.random.choice([None, self.now + self.random.randrange(6)])
        self.policy.retain(block, priority, expires_at)  # type: ignore[attr-defined]
        if self.model is not None:
            self.model.wish(block, self.content[block], priority, expires_at)
            self._compare_wishes()
        return True

    def advance(self) -> bool:
        self.now += self.random.randrange(3)
        self.policy.advance(self.now)  # type: ignore[attr-defined]
        if self.model is not None:
            self.model.advance(self.now)
            self._compare_wishes()
        return True

    def _compare_wishes(self) -> None:
        wished = {block for block in range(1, self.num_blocks) if self.policy.is_retained(block)}  # type: ignore[attr-defined]
        assert wished == set(self.model.wishes)
        assert self.policy.num_retained == len(wished)  # type: ignore[attr-defined]

    def drain(self) -> list[int]:
        """Evict all that is idle; the order."""
        before = len(self.evicted)
        while self.idle:
            self.evict()
            self.policy.check()
        return self.evicted[before:]
