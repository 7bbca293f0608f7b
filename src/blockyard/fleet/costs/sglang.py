"""SGLang's gateway (`cache_aware`) keeps a tree of what it sent, behind a gate on load (its defaults, 2026)."""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Candidates, Floats
from ..prefixes import Prefixes

MATCH_THRESHOLD = 0.3
BALANCE_ABSOLUTE, BALANCE_RELATIVE = 64, 1.5
#: Links of a replica's tree.
TREE_LIMIT = 2**26


class SGLang:
    """Takes the longest match above 0.3 of the prompt, else the smallest tree; the shortest queue if out of balance."""

    def __init__(self) -> None:
        self._tree = Prefixes(TREE_LIMIT)

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return requests, sizes of trees, or matches with their sign turned."""
        most, least = candidates.requests.max(), candidates.requests.min()
        if most - least > BALANCE_ABSOLUTE and most > BALANCE_RELATIVE * least:
            return candidates.requests.astype(np.float64)
        rows = {name: row for row, name in enumerate(candidates.names)}
        matches = self._tree.lengths(ask.links, rows) * ask.link_tokens
        if matches.max() > MATCH_THRESHOLD * ask.num_tokens:
            return -matches.astype(np.float64)
        return np.array([self._tree.sizes.get(name, 0) for name in candidates.names], np.float64)

    def sent(self, ask: Ask, replica: str) -> None:
        """Put the prompt into the tree."""
        self._tree.add(ask.links, replica)

    def gone(self, replica: str) -> None:
        """Drop its tree."""
        self._tree.forget(replica)
