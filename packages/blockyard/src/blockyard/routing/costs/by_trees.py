"""Costs of other routers that match a prompt with the prompts they sent before."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from ..cost import Candidates, Floats, Ints, RouteRequest
from ..prefixes import Prefixes
from .blind import two_choices


class SentTree:
    """A tree of the prompts that each replica was sent, with at most `limit` links per replica."""

    def __init__(self, limit: int = 2**20) -> None:
        self._tree = Prefixes(limit)

    def matches(self, request: RouteRequest, candidates: Candidates) -> Ints:
        """Return how many leading tokens of the prompt each candidate was sent before. O(links)."""
        rows = {name: row for row, name in enumerate(candidates.names)}
        return self._tree.lengths(request.links, rows) * request.link_tokens

    def sizes(self, candidates: Candidates) -> Floats:
        """Return the size of each candidate's tree."""
        return np.array([self._tree.sizes.get(name, 0) for name in candidates.names], np.float64)

    def record(self, request: RouteRequest, replica: str) -> None:
        self._tree.add(request.links, replica)

    def forget(self, replica: str) -> None:
        self._tree.forget(replica)


class SGLang(SentTree):
    """Longest match above 0.3 of the prompt, else the smallest tree; the shortest queue if queues are out of balance.

    SGLang's gateway (`cache_aware`, its defaults, 2026).
    """

    MATCH_THRESHOLD = 0.3
    BALANCE_ABSOLUTE, BALANCE_RELATIVE = 64, 1.5

    def __init__(self) -> None:
        super().__init__(2**26)

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        most, least = candidates.requests.max(), candidates.requests.min()
        if most - least > self.BALANCE_ABSOLUTE and most > self.BALANCE_RELATIVE * least:
            return candidates.requests.astype(np.float64)
        matches = self.matches(request, candidates)
        if matches.max() > self.MATCH_THRESHOLD * request.num_tokens:
            return -matches.astype(np.float64)
        return self.sizes(candidates)


class AIBrix(SentTree):
    """Longest match if the replica's requests are within one standard deviation of the mean, else the fewest requests.

    AIBrix' `prefix-cache` (its defaults, 2026).
    """

    #: Matches count only if the most requests are at most twice the mean plus one, or less than 8 above the fewest.
    IMBALANCE_FACTOR, IMBALANCE_GAP = 2.0, 8

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        """Return the number of requests, minus the matched tokens weighted so that they outweigh all requests."""
        requests = candidates.requests.astype(np.float64)
        matches = self.matches(request, candidates)
        most, least = requests.max(), requests.min()
        if most - least >= self.IMBALANCE_GAP and most > self.IMBALANCE_FACTOR * (requests.mean() + 1):
            matches[requests > least] = 0
        matches[requests > requests.mean() + requests.std()] = 0
        costs: Floats = requests - matches * (requests.max() + 1)
        return costs


class RayAffinity(SentTree):
    """Longest match from 0.1 of the prompt on, else the smallest tree, by the power of two choices among equals.

    Ray's `PrefixCacheAffinityRouter` (2.60).

    Args:
        seed: seed of the random choices.
        imbalanced_threshold: largest difference between the longest and the shortest queue; beyond it only queues
            decide.
    """

    MATCH_RATE = 0.1

    def __init__(self, seed: int = 0, imbalanced_threshold: float = math.inf) -> None:
        super().__init__()
        self._draw = np.random.default_rng(seed)
        self._threshold = imbalanced_threshold

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        is_meant = np.ones(len(candidates.names), np.bool_)
        if candidates.requests.max() - candidates.requests.min() <= self._threshold:
            matches = self.matches(request, candidates)
            if matches.max() >= self.MATCH_RATE * request.num_tokens:
                is_meant = matches == matches.max()
            else:
                sizes = self.sizes(candidates)
                is_meant = sizes == sizes.min()
        return two_choices(self._draw, candidates, is_meant)


class Preble(SentTree):
    """The longest match if more than half of the prompt matches, else the lowest load of the last three minutes.

    The load is in seconds: for tokens computed there in the window, and for those that this request would compute. The
    cost of evictions is omitted because the router does not know the replicas' capacity. E2 of Srivatsa et al. (ICLR
    2025).
    """

    #: Seconds of the past that count as load.
    WINDOW = 180.0
    #: A match is ignored if its replica's load is this many times the lowest. The value is our choice.
    MOST_IMBALANCE = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._window: deque[tuple[float, str, int]] = deque()
        self._loads: dict[str, int] = {}
        self._missing: dict[str, int] = {}

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        while self._window and self._window[0][0] < request.now - self.WINDOW:
            _, name, tokens = self._window.popleft()
            self._loads[name] = self._loads.get(name, 0) - tokens
        matches = np.minimum(self.matches(request, candidates), request.num_tokens)
        self._missing = dict(zip(candidates.names, (request.num_tokens - matches).tolist(), strict=True))
        loads = np.array([self._loads.get(name, 0) for name in candidates.names], np.float64)
        costs: Floats = candidates.seconds_a_token * (loads + request.num_tokens - matches)
        is_best = matches == matches.max()
        if 2 * matches.max() > request.num_tokens and loads[is_best].min() <= self.MOST_IMBALANCE * max(
            loads.min(), 1.0
        ):
            costs[~is_best] = np.inf
        return costs

    def record(self, request: RouteRequest, replica: str) -> None:
        missing = self._missing.get(replica, request.num_tokens)
        self._window.append((request.now, replica, missing))
        self._loads[replica] = self._loads.get(replica, 0) + missing
        super().record(request, replica)

    def forget(self, replica: str) -> None:
        super().forget(replica)
        self._loads.pop(replica, None)
        self._window = deque(entry for entry in self._window if entry[1] != replica)
