"""Round robin takes each replica in its turn."""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Candidates, Floats, PlainCost


class RoundRobin(PlainCost):
    """Takes the replica whose turn is the longest ago."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:  # noqa: ARG002
        """Return the number of each one's last turn."""
        return np.array([self._turns.get(name, 0) for name in candidates.names], np.float64)

    def sent(self, ask: Ask, replica: str) -> None:  # noqa: ARG002
        """Its turn is over."""
        self._turn += 1
        self._turns[replica] = self._turn

    def gone(self, replica: str) -> None:
        """Its turn comes no more."""
        self._turns.pop(replica, None)
