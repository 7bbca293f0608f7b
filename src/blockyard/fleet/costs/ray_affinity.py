"""Ray's `PrefixCacheAffinityRouter` keeps a tree of what it sent, then takes power of two (Ray 2.60)."""

from __future__ import annotations

import math

import numpy as np

from ..asking import Ask, Candidates, Floats
from ..prefixes import Prefixes
from .power_of_two import two_choices

MATCH_RATE = 0.1
TREE_LIMIT = 2**20


class RayAffinity:
    """Takes the longest match from 0.1 of the prompt on, else the smallest tree.

    imbalanced_threshold: requests that the longest queue may be above the shortest; beyond, queues alone decide.
    """

    def __init__(self, seed: int = 0, imbalanced_threshold: float = math.inf) -> None:
        self._tree = Prefixes(TREE_LIMIT)
        self._draw = np.random.default_rng(seed)
        self._threshold = imbalanced_threshold

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return 0 for the replica taken, inf for others."""
        is_meant = np.ones(len(candidates.names), np.bool_)
        if candidates.requests.max() - candidates.requests.min() <= self._threshold:
            rows = {name: row for row, name in enumerate(candidates.names)}
            matches = self._tree.lengths(ask.links, rows) * ask.link_tokens
            if matches.max() >= MATCH_RATE * ask.num_tokens:
                is_meant = matches == matches.max()
            else:
                sizes = np.array([self._tree.sizes.get(name, 0) for name in candidates.names])
                is_meant = sizes == sizes.min()
        return two_choices(self._draw, candidates, is_meant)

    def sent(self, ask: Ask, replica: str) -> None:
        """Put the prompt into the tree."""
        self._tree.add(ask.links, replica)

    def gone(self, replica: str) -> None:
        """Drop its tree."""
        self._tree.forget(replica)
