"""This bounds what a cache of states, and of keys and values under them, can hit, and finds a schedule near it.

A request that hits `p` tokens needs its state from the last request that passed `p` until now, and each block of keys
and values before `p` from the last one that had it. Of one content these spans never overlap, and what overlaps of all
contents fits the budget: a packing problem. With a price on memory after each request its value is bounded from above,
whatever the prices (Lagrange; Held, Wolfe and Crowder, Mathematical Programming 6, 1974, for how they are found).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard_lab import Trace
from blockyard_lab.oracle import next_turns
from blockyard_lab.references import SessionTracker, UnknownContents, blocks_of

#: How often prices are moved at most, and after how many moves that brought nothing the steps become shorter.
MOVES, PATIENCE = 1500, 20
Prices = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StateLoad:
    """It has the full blocks of a trace's prompts, in order; a request ends with its prompt: traces name no outputs.

    keys: (blocks,) int64, from 1; those of request r are keys[starts[r]:starts[r + 1]]. prompts: (R,) int64 tokens.
    sessions: (R,) int64, from 1, as `SessionTracker` tells them.
    """

    name: str
    tokens_a_block: int
    keys: NDArray[np.int64]
    starts: NDArray[np.int64]
    prompts: NDArray[np.int64]
    sessions: NDArray[np.int64]

    @property
    def working_set(self) -> int:
        """Returns how many different blocks there are."""
        return int(self.keys.max(initial=1))

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of all prompts."""
        return int(self.prompts.sum())

    def last_turns(self) -> set[int]:
        """Return the requests that are the last of their sessions. O(requests * log requests)."""
        return set(np.flatnonzero(next_turns(self.sessions) < 0).tolist())

    def keys_of(self, request: int) -> NDArray[np.int64]:
        """Return the keys of a request's blocks."""
        return self.keys[self.starts[request] : self.starts[request + 1]]


def read_state_load(trace: Trace, block_size: int = 16) -> StateLoad:
    """Walk through a trace once and keep its full blocks: its own, or of `block_size` tokens where it has tokens.

    O(blocks), in memory too. Raises `UnknownContents`, and what the reader raises.
    """
    size = trace.hash_block_size or block_size
    found, prompts, sessions, tracker = [np.empty(0, np.int64)], [], [], SessionTracker()
    for request in trace:
        ids = blocks_of(request, size)
        if ids is None:
            raise UnknownContents(f"{trace.name} says nothing of contents, so no prompt can hit another's states")
        found.append(ids[: request.num_prompt_tokens // size])
        prompts.append(request.num_prompt_tokens)
        sessions.append(1 + tracker.number(request.session, found[-1], len(found[-1])))
    starts = np.cumsum([len(ids) for ids in found])
    _, keys = np.unique(np.concatenate(found), return_inverse=True)
    numbers = keys.astype(np.int64) + 1
    return StateLoad(trace.name, size, numbers, starts, np.array(prompts, np.int64), np.array(sessions, np.int64))


class StateBound:
    """It knows the hits that a load allows. `ideal`: tokens that a cache without limits hits, with a state everywhere.

    O(blocks) time and memory.
    """

    def __init__(self, load: StateLoad) -> None:
        self.load = load
        self.num_requests = len(load.prompts)
        size, last = load.tokens_a_block, np.full(load.working_set + 1, -1)
        rows, since, ends, sizes = [], [], [], []
        for number in range(self.num_requests):
            keys = load.keys_of(number)
            before = last[keys[: (load.prompts[number] - 1) // size]]
            last[keys] = number
            known = before[: int(np.argmax(before < 0)) if (before < 0).any() else len(before)]
            if len(known):
                cut = np.append(np.flatnonzero(np.diff(known)) + 1, len(known))
                rows.append(np.full(len(cut), number))
                since.append(known[cut - 1])
                ends.append(cut * size)
                sizes.append(np.diff(cut, prepend=0) * size)
        none = [np.empty(0, np.int64)]
        #: Pieces of prompts that one earlier request was the last to have: whose, by whom, where they end, and tokens.
        self._row, self._since = np.concatenate(none + rows), np.concatenate(none + since)
        self._end, self._size = np.concatenate(none + ends), np.concatenate(none + sizes)
        #: The first piece of each request that has one.
        self._first = np.flatnonzero(np.diff(self._row, prepend=-1))
        self._count = np.diff(self._first, append=len(self._row))
        self.ideal = int(self._end[self._first + self._count - 1].sum())

    def _values(self, prices: Prices, state_tokens: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns what a hit up to each piece is worth at these prices, and the prices summed up to each request."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        held = total[self._row] - total[self._since]
        cost = np.cumsum(self._size * held)
        cost -= np.repeat(cost[self._first] - (self._size * held)[self._first], self._count)
        return self._end - cost - state_tokens * held, total

    def _dual(self, prices: Prices, state_tokens: int, budget: int) -> tuple[float, Prices]:
        """Returns the bound at these prices, and by how much what it counts is under the budget, after each request."""
        values, total = self._values(prices, state_tokens)
        best = np.maximum.reduceat(values, self._first)
        is_best = values == np.repeat(best, self._count)
        after = np.cumsum(is_best) - np.repeat(np.cumsum(is_best)[self._first] - is_best[self._first], self._count)
        is_hit = np.repeat(best > 0, self._count)
        is_held, is_end = is_hit & (after - is_best == 0), is_hit & is_best & (after == 1)
        change = np.zeros(self.num_requests + 1)
        for where, sizes in ((is_held, self._size), (is_end, np.full(len(values), state_tokens))):
            change += np.bincount(self._since[where], sizes[where], self.num_requests + 1)
            change -= np.bincount(self._row[where], sizes[where], self.num_requests + 1)
        return float(best[best > 0].sum() + budget * total[-1]), budget - np.cumsum(change)[:-1]

    def at(self, state_tokens: int, budget: int) -> tuple[int, Prices]:
        """Return tokens that no cache of `budget` tokens can hit more of, and the prices that show it.

        state_tokens: of a state, in tokens of keys and values. O(pieces) for each of up to `MOVES` moves of prices.
        """
        if not len(self._row):
            return 0, np.zeros(self.num_requests)
        flat = [np.full(self.num_requests, price) for price in (0.0, *np.geomspace(1e-9, 1e-1, 40))]
        best, prices = min(((self._dual(each, state_tokens, budget)[0], each) for each in flat), key=lambda it: it[0])
        found, scale, stale = prices, 1.0, 0
        for _ in range(MOVES):
            bound, room = self._dual(prices, state_tokens, budget)
            if bound < best * (1 - 1e-9):
                best, found, stale = bound, prices, 0
            else:
                stale += 1
            if stale == PATIENCE:
                prices, scale, stale = found, scale * 0.7, 0
                bound, room = self._dual(prices, state_tokens, budget)
            moves = np.where((room < 0) | (prices > 0), room, 0.0)
            if scale < 1e-3 or not moves.any():
                break
            prices = np.maximum(prices - scale * bound / float(moves @ moves) * moves, 0.0)
        return min(int(best), self.ideal), found

    def schedule(self, state_tokens: int, budget: int, prices: Prices) -> int:
        """Return tokens that a cache hits which knows the future: requests choose in turn, the best by bytes first.

        A state comes from a request that computed it, or held it for another; a request that is to compute one hits
        nothing behind it. The better of two orders, at `prices` of `at`. O(pieces * requests).
        """
        if not len(self._row):
            return 0
        values, _ = self._values(prices, state_tokens)
        parts = np.split(values, self._first[1:])
        worth = np.array([part.max() for part in parts])
        saved = self._end[self._first + [int(part.argmax()) for part in parts]]
        orders = (-saved / (saved - worth + 1e-9), -worth)
        return max(self._packed(np.argsort(order), parts, state_tokens, budget) for order in orders)

    def _packed(self, order: NDArray[np.int64], parts: list[Prices], state_tokens: int, budget: int) -> int:
        load, size = self.load, self.load.tokens_a_block
        by_key = np.argsort(load.keys, kind="stable")
        owner = np.repeat(np.arange(self.num_requests), np.diff(load.starts))[by_key]
        bounds = np.searchsorted(load.keys[by_key], np.arange(load.working_set + 2))
        ideal = np.zeros(self.num_requests, np.int64)
        ideal[self._row[self._first]] = self._end[self._first + self._count - 1]
        used, hits = np.zeros(self.num_requests), np.full(self.num_requests, -1)
        limits = np.full(self.num_requests, np.iinfo(np.int64).max)
        spans: dict[int, list[tuple[int, int]]] = {}
        for place in order:
            at, row = self._first[place], int(self._row[self._first[place]])
            for depth in np.argsort(-parts[place]):
                end = int(self._end[at + depth])
                if end > limits[row]:
                    continue
                key = int(load.keys_of(row)[end // size - 1])
                source = row
                if not any(first < row < last for first, last in spans.get(key, ())):
                    had = owner[bounds[key] : bounds[key] + np.searchsorted(owner[bounds[key] : bounds[key + 1]], row)]
                    can = np.where(hits[had] >= 0, hits[had], ideal[had]) <= end
                    if not can.any():
                        continue
                    source = int(had[np.flatnonzero(can)[-1]])
                since, sizes = self._since[at : at + depth + 1], self._size[at : at + depth + 1]
                begin = min(source, int(since[-1]))
                change = np.bincount(since - begin, sizes, row - begin + 1)
                change[source - begin] += state_tokens
                held = np.cumsum(change)[: row - begin]
                if (used[begin:row] + held > budget).any():
                    continue
                used[begin:row] += held
                if source < row:
                    spans.setdefault(key, []).append((source, row))
                    if hits[source] < 0:
                        limits[source] = min(limits[source], end)
                hits[row] = end
                break
        return int(hits[hits > 0].sum())
