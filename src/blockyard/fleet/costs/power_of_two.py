"""Power of two choices takes the shorter queue of two drawn (Mitzenmacher, 2001); it is Ray Serve's default."""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Bools, Candidates, Floats, PlainCost


def two_choices(draw: np.random.Generator, candidates: Candidates, is_meant: Bools) -> Floats:
    """Return the requests of two drawn from those meant, inf for others."""
    costs: Floats = np.full(len(candidates.names), np.inf)
    meant = np.flatnonzero(is_meant)
    drawn = draw.choice(meant, min(2, len(meant)), replace=False)
    costs[drawn] = candidates.requests[drawn]
    return costs


class PowerOfTwo(PlainCost):
    """Draws two replicas and takes the one with fewer requests."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:  # noqa: ARG002
        """Return requests of the two drawn, inf for others."""
        return two_choices(self._draw, candidates, np.ones(len(candidates.names), np.bool_))
