"""AIBrix' `prefix-cache` keeps a table of what it sent, behind a gate on requests (its defaults, 2026)."""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Candidates, Floats
from ..prefixes import Prefixes

#: The gate closes when the most requests are above twice the mean plus one, and 8 above the least.
IMBALANCE_FACTOR, IMBALANCE_GAP = 2.0, 8
DEVIATIONS = 1
TABLE_LIMIT = 2**20


class AIBrix:
    """Takes the longest match whose requests are within the mean and a deviation; else the fewest requests."""

    def __init__(self) -> None:
        self._table = Prefixes(TABLE_LIMIT)

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return requests, less the prompt's whole length for each token that matches where a match counts."""
        requests = candidates.requests.astype(np.float64)
        rows = {name: row for row, name in enumerate(candidates.names)}
        matches = self._table.lengths(ask.links, rows)
        if requests.max() - requests.min() >= IMBALANCE_GAP and requests.max() > IMBALANCE_FACTOR * (
            requests.mean() + 1
        ):
            matches[requests > requests.min()] = 0
        matches[requests > requests.mean() + DEVIATIONS * requests.std()] = 0
        costs: Floats = requests - matches * (requests.max() + 1)
        return costs

    def sent(self, ask: Ask, replica: str) -> None:
        """Put the prompt into the table."""
        self._table.add(ask.links, replica)

    def gone(self, replica: str) -> None:
        """Drop what it was sent."""
        self._table.forget(replica)
