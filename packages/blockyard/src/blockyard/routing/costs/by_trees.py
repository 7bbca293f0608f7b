"""Costs of others that remember what they sent, and match a prompt with that."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from ..asking import Ask, Candidates, Floats, Ints
from ..prefixes import Prefixes
from .blind import two_choices


class SentTree:
    """Keeps a tree of the prompts that each replica was sent, of `limit` links each."""

    def __init__(self, limit: int = 2**20) -> None:
        self._tree = Prefixes(limit)

    def matches(self, ask: Ask, candidates: Candidates) -> Ints:
        """Return how many leading tokens of the prompt each was sent before. O(links)."""
        rows = {name: row for row, name in enumerate(candidates.names)}
        return self._tree.lengths(ask.links, rows) * ask.link_tokens

    def sizes(self, candidates: Candidates) -> Floats:
        """Return the size of each one's tree."""
        return np.array([self._tree.sizes.get(name, 0) for name in candidates.names], np.float64)

    def sent(self, ask: Ask, replica: str) -> None:
        """Put the prompt into the tree."""
        self._tree.add(ask.links, replica)

    def gone(self, replica: str) -> None:
        """Drop its tree."""
        self._tree.forget(replica)


class SGLang(SentTree):
    """Takes the longest match above 0.3 of the prompt, else the smallest tree; the shortest queue if out of balance.

    SGLang's gateway (`cache_aware`, its defaults, 2026).
    """

    MATCH_THRESHOLD = 0.3
    BALANCE_ABSOLUTE, BALANCE_RELATIVE = 64, 1.5

    def __init__(self) -> None:
        super().__init__(2**26)

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return requests, sizes of trees, or matches with their sign turned."""
        most, least = candidates.requests.max(), candidates.requests.min()
        if most - least > self.BALANCE_ABSOLUTE and most > self.BALANCE_RELATIVE * least:
            return candidates.requests.astype(np.float64)
        matches = self.matches(ask, candidates)
        if matches.max() > self.MATCH_THRESHOLD * ask.num_tokens:
            return -matches.astype(np.float64)
        return self.sizes(candidates)


class AIBrix(SentTree):
    """Takes the longest match whose requests are within the mean and a deviation; else the fewest requests.

    AIBrix' `prefix-cache`, a table behind a gate on requests (its defaults, 2026).
    """

    #: The gate closes when the most requests are above twice the mean plus one, and 8 above the least.
    IMBALANCE_FACTOR, IMBALANCE_GAP = 2.0, 8

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return requests, less the prompt's whole length for each token that matches where a match counts."""
        requests = candidates.requests.astype(np.float64)
        matches = self.matches(ask, candidates)
        most, least = requests.max(), requests.min()
        if most - least >= self.IMBALANCE_GAP and most > self.IMBALANCE_FACTOR * (requests.mean() + 1):
            matches[requests > least] = 0
        matches[requests > requests.mean() + requests.std()] = 0
        costs: Floats = requests - matches * (requests.max() + 1)
        return costs


class RayAffinity(SentTree):
    """Takes the longest match from 0.1 of the prompt on, else the smallest tree.

    Ray's `PrefixCacheAffinityRouter` (2.60), which then takes power of two.
    imbalanced_threshold: requests that the longest queue may be above the shortest; beyond, queues alone decide.
    """

    MATCH_RATE = 0.1

    def __init__(self, seed: int = 0, imbalanced_threshold: float = math.inf) -> None:
        super().__init__()
        self._draw = np.random.default_rng(seed)
        self._threshold = imbalanced_threshold

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return 0 for the replica taken, inf for others."""
        is_meant = np.ones(len(candidates.names), np.bool_)
        if candidates.requests.max() - candidates.requests.min() <= self._threshold:
            matches = self.matches(ask, candidates)
            if matches.max() >= self.MATCH_RATE * ask.num_tokens:
                is_meant = matches == matches.max()
            else:
                sizes = self.sizes(candidates)
                is_meant = sizes == sizes.min()
        return two_choices(self._draw, candidates, is_meant)


class Preble(SentTree):
    """Exploits where more of the prompt matches than is missing; else takes the least load of three minutes.

    The load is in seconds: what was computed there in the window, and what this request would have to compute. What an
    eviction costs is left out: it takes each replica's capacity, which this router is not told. E2 of Srivatsa et al.
    (ICLR 2025).
    """

    #: Seconds of the past that count as load.
    WINDOW = 180.0
    #: A match is given up where its replica's load is this many times the least one. The value is ours.
    MOST_IMBALANCE = 2.0

    def __init__(self) -> None:
        super().__init__()
        self._window: deque[tuple[float, str, int]] = deque()
        self._loads: dict[str, int] = {}
        self._missing: dict[str, int] = {}

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return seconds; inf for replicas that an exploited match leaves out."""
        while self._window and self._window[0][0] < ask.now - self.WINDOW:
            _, name, tokens = self._window.popleft()
            self._loads[name] = self._loads.get(name, 0) - tokens
        matches = np.minimum(self.matches(ask, candidates), ask.num_tokens)
        self._missing = dict(zip(candidates.names, (ask.num_tokens - matches).tolist(), strict=True))
        loads = np.array([self._loads.get(name, 0) for name in candidates.names], np.float64)
        costs: Floats = candidates.seconds_a_token * (loads + ask.num_tokens - matches)
        is_best = matches == matches.max()
        if 2 * matches.max() > ask.num_tokens and loads[is_best].min() <= self.MOST_IMBALANCE * max(loads.min(), 1.0):
            costs[~is_best] = np.inf
        return costs

    def sent(self, ask: Ask, replica: str) -> None:
        """Put the prompt into the tree, and its missing part into the window."""
        missing = self._missing.get(replica, ask.num_tokens)
        self._window.append((ask.now, replica, missing))
        self._loads[replica] = self._loads.get(replica, 0) + missing
        super().sent(ask, replica)

    def gone(self, replica: str) -> None:
        """Drop its tree and its load."""
        super().gone(replica)
        self._loads.pop(replica, None)
        self._window = deque(entry for entry in self._window if entry[1] != replica)
