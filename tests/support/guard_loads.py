"""Random loads of prompts with common beginnings, the worst policy there is, and least recently used, as an odict."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

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
