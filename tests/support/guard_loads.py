"""Random loads of prompts with common beginnings, the worst policy there is, and least recently used, as an odict."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from blockyard.core.policies.base import EvictionPolicy
from blockyard.core.policies.layers.guarded import Guarded
from blockyard.lab.simulation.policy_run import PolicyRun

NEVER = 2**62


class Load:
    """Requests as paths in a random tree, `num_contents` nodes, each with one parent; drawn in one of five ways."""

    def __init__(self, seed: int, num_references: int) -> None:
        self.random = random.Random(seed)
        self.num_contents = self.random.choice([20, 60, 200, 600])
        self.parents = self._tree()
        self.kind = self.random.choice(["even", "skewed", "loop", "recent", "turns"])
        self.requests: list[list[int]] = []
        left = num_references
        for node in self._leaves():
            self.requests.append(self.path(node))
            left -= len(self.requests[-1])
            if left <= 0:
                break
        self.longest = max(map(len, self.requests))
        self.capacity = self.random.randrange(1, max(self.num_contents, 2 * self.longest))

    def _tree(self) -> list[int]:
        """The parent of each node, -1 for a first block. Chains are long where few nodes branch."""
        bushy = self.random.choice([0.05, 0.3, 0.9])
        parents = [-1]
        for node in range(1, self.num_contents):
            parents.append(self.random.randrange(-1, node) if self.random.random() < bushy else node - 1)
            if len(self._up(parents, node)) > 30:
                parents[node] = -1
        return parents

    def _up(self, parents: list[int], node: int) -> list[int]:
        found = []
        while node >= 0:
            found.append(node)
            node = parents[node]
        return found

    def path(self, node: int) -> list[int]:
        """From the first block to the node."""
        return self._up(self.parents, node)[::-1]

    def _leaves(self) -> Iterator[int]:
        """The last node of each request, without end."""
        kind, place = self.kind, 0
        recent = [self.random.randrange(self.num_contents)]
        while True:
            place += 1
            drawn = self.random.randrange(self.num_contents)
            if kind == "turns" and place % 40 == 0:
                recent = [drawn]
            if kind == "loop":
                yield place % self.num_contents
            elif kind == "skewed":
                yield int(self.num_contents * self.random.random() ** 4)
            elif kind in ("recent", "turns") and self.random.random() < 0.7:
                yield self.random.choice(recent[-8:])
            else:
                recent.append(drawn)
                yield drawn

    def next_uses(self) -> list[list[int]]:
        """For each request, when each of its contents is asked for next."""
        latest: dict[int, int] = {}
        following = []
        for number in range(len(self.requests) - 1, -1, -1):
            following.append([latest.get(content, NEVER) for content in self.requests[number]])
            latest |= dict.fromkeys(self.requests[number], number)
        return following[::-1]


class Adversary(EvictionPolicy):
    """Evicts what is asked for next. It is told the future: `next_use` has when each content is asked for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.content: dict[int, int] = {}
        self.next_use: dict[int, int] = {}

    def insert(self, block: int, key: int, depth: int) -> None:
        self.content[block] = key

    def remove(self, block: int) -> None:
        del self.content[block]

    def evict(self) -> int:
        content, uses = self.content, self.next_use
        block = min(content, key=lambda block: uses[content[block]])
        del content[block]
        return block

    def clear(self) -> None:
        self.content = {}


class SlowLRU:
    """Hits of least recently used, one request after another."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.num_hits = 0

    def request(self, contents: list[int]) -> None:
        found = 0
        while found < len(contents) and contents[found] in self.cached:
            found += 1
        self.num_hits += found
        for content in reversed(contents):
            self.cached.pop(content, None)
            self.cached[content] = None
        while len(self.cached) > self.capacity:
            self.cached.popitem(last=False)


class GuardedLoad:
    """A load through a guard around `policy` and through `SlowLRU`; `step()` is one request, and compares them."""

    def __init__(self, load: Load, policy: EvictionPolicy, strict: bool) -> None:
        self.load = load
        self.policy = policy
        self.guard = Guarded(policy, strict)
        self.run = PolicyRun(self.guard, load.capacity, load.num_contents, load.longest)
        self.lru = SlowLRU(load.capacity)
        self.uses = load.next_uses()
        self.num_references = 0
        #: The lowest difference to LRU so far, in hits a reference.
        self.worst = 0.0

    def step(self, number: int) -> None:
        """The inequality and the floor after each request."""
        contents = self.load.requests[number]
        if isinstance(self.policy, Adversary):
            self.policy.next_use |= dict(zip(contents, self.uses[number], strict=True))
        self.run.run(np.array(contents, np.int64), np.array([0, len(contents)], np.int64))
        self.lru.request(contents)
        self.num_references += len(contents)
        self.guard.check()
        ahead = self.run.num_hits - self.lru.num_hits
        self.worst = min(self.worst, ahead / self.num_references)
        if 1000 * ahead < (-2 if self.guard.strict else -3) * self.num_references:
            raise AssertionError(f"request {number}: {self.run.num_hits} hits, LRU has {self.lru.num_hits}")
        if self.guard.num_shadow_hits < self.lru.num_hits:
            raise AssertionError(
                f"request {number}: the shadow has {self.guard.num_shadow_hits} hits, LRU {self.lru.num_hits}"
            )

    @staticmethod
    def num_ids(load: Load) -> int:
        """Block ids that the run of a load needs."""
        return load.capacity + load.longest + 1
