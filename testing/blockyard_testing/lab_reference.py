"""Caches of named blocks, slow and obvious: what the compiled loops of the lab must agree with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np

from blockyard_lab import Skips, TraceRequest

Requests = list[list[int]]


def prefix_trace(seed: int, num_requests: int, *, branches: int = 3, longest: int = 6) -> Requests:
    """Requests whose ids name paths in a random tree: an id has one parent, as block names of prompts do."""
    rng = random.Random(seed)
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for _ in range(num_requests):
        path: tuple[int, ...] = ()
        request = []
        for _ in range(rng.randint(1, longest)):
            path = (*path, rng.randrange(branches))
            request.append(names.setdefault(path, len(names)))
        requests.append(request)
    return requests


def run(requests: Requests, capacity: int, victim: Callable[[list[int], int], int]) -> int:
    """Hits of a cache that asks `victim(idle, number of the request)` for the content to give up.

    idle: contents, those released first at the front; a request releases its ids from the last to the first.
    """
    cached: list[int] = []
    hits = 0
    for number, request in enumerate(requests):
        for content in request:
            if content not in cached:
                break
            hits += 1
        cached = [content for content in cached if content not in request] + request[::-1]
        while len(cached) > capacity:
            cached.remove(victim(cached, number))
    return hits


def lru(requests: Requests, capacity: int) -> int:
    """The content released first goes first."""
    return run(requests, capacity, lambda cached, number: cached[0])


def lfu(requests: Requests, capacity: int) -> int:
    """The content of the fewest requests goes first, among equals the one released first."""

    def victim(cached: list[int], number: int) -> int:
        counts = {content: sum(content in request for request in requests[: number + 1]) for content in cached}
        return min(cached, key=lambda content: (counts[content], cached.index(content)))

    return run(requests, capacity, victim)


def belady(requests: Requests, capacity: int) -> int:
    """The content whose next request is the farthest goes first, in one request the deepest."""

    def victim(cached: list[int], number: int) -> int:
        def next_use(content: int) -> tuple[int, int]:
            for later in range(number + 1, len(requests)):
                if content in requests[later]:
                    return later, requests[later].index(content)
            return len(requests), 0

        return max(cached, key=next_use)

    return run(requests, capacity, victim)


def best_possible(requests: Requests, capacity: int) -> int:
    """The most hits of any cache whatever, by trying every choice of what to keep after every request."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        following: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            here = hits + sum(1 for _ in leading(request, cached))
            everything = cached | set(request)
            for size in range(min(capacity, len(everything)) + 1):
                for kept in combinations(sorted(everything), size):
                    state = frozenset(kept)
                    following[state] = max(following.get(state, 0), here)
        states = following
    return max(states.values())


def leading(request: list[int], cached: frozenset[int]) -> Iterator[int]:
    """The ids of a request up to the first that is not cached."""
    for content in request:
        if content not in cached:
            return
        yield content


class ListedTrace:
    """The requests of a list, as a `Trace`."""

    def __init__(self, requests: Sequence[TraceRequest], hash_block_size: int = 16, name: str = "listed") -> None:
        self.name = name
        self.hash_block_size = hash_block_size
        self.skips = Skips()
        self._requests = list(requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)


def named(ids: Sequence[Sequence[int]], *, size: int = 16, output: int = 1, every: float = 1.0) -> ListedTrace:
    """A trace of full blocks with these ids; a request arrives `every` seconds."""
    return ListedTrace(
        [
            TraceRequest(number * every, len(request) * size, output, np.array(request, np.int64))
            for number, request in enumerate(ids)
        ],
        size,
    )


def lengths(pairs: Sequence[tuple[int, int]], *, every: float = 1.0) -> ListedTrace:
    """A trace of (prompt, output) lengths without contents."""
    return ListedTrace([TraceRequest(i * every, prompt, output) for i, (prompt, output) in enumerate(pairs)], 0)
