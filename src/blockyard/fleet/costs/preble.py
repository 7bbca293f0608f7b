"""Preble's E2 takes a long match, and else has a look at loads (Srivatsa et al., ICLR 2025)."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..asking import Ask, Candidates, Floats
from ..prefixes import Prefixes

#: Seconds of the past that count as load.
WINDOW = 180.0
#: A match is given up where its replica's load is this many times the least one. The value is ours.
MOST_IMBALANCE = 2.0
TREE_LIMIT = 2**20


class Preble:
    """Exploits where more of the prompt matches than is missing; else takes the least load of three minutes.

    The load is in seconds: what was computed there in the window, and what this request would have to compute. What an
    eviction costs is left out: it takes each replica's capacity, which this router is not told.
    """

    def __init__(self) -> None:
        self._tree = Prefixes(TREE_LIMIT)
        self._window: deque[tuple[float, str, int]] = deque()
        self._loads: dict[str, int] = {}
        self._missing: dict[str, int] = {}

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return seconds; inf for replicas that an exploited match leaves out."""
        while self._window and self._window[0][0] < ask.now - WINDOW:
            _, name, tokens = self._window.popleft()
            self._loads[name] = self._loads.get(name, 0) - tokens
        rows = {name: row for row, name in enumerate(candidates.names)}
        matches = np.minimum(self._tree.lengths(ask.links, rows) * ask.link_tokens, ask.num_tokens)
        self._missing = dict(zip(candidates.names, (ask.num_tokens - matches).tolist(), strict=True))
        loads = np.array([self._loads.get(name, 0) for name in candidates.names], np.float64)
        costs: Floats = candidates.seconds_a_token * (loads + ask.num_tokens - matches)
        is_best = matches == matches.max()
        if 2 * matches.max() > ask.num_tokens and loads[is_best].min() <= MOST_IMBALANCE * max(loads.min(), 1.0):
            costs[~is_best] = np.inf
        return costs

    def sent(self, ask: Ask, replica: str) -> None:
        """Put the prompt into the tree, and its missing part into the window."""
        missing = self._missing.get(replica, ask.num_tokens)
        self._window.append((ask.now, replica, missing))
        self._loads[replica] = self._loads.get(replica, 0) + missing
        self._tree.add(ask.links, replica)

    def gone(self, replica: str) -> None:
        """Drop its tree and its load."""
        self._tree.forget(replica)
        self._loads.pop(replica, None)
        self._window = deque(entry for entry in self._window if entry[1] != replica)
