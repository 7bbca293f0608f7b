"""vLLM production-stack's `loadaware` routing is a match less a load (its pull request 1035, August 2026)."""

from __future__ import annotations

from ..asking import Ask, Candidates, Floats, PlainCost


class ProductionStack(PlainCost):
    """Takes the most of `matched / prompt - beta * (load - mean load) / max(1, mean load)`, load in requests."""

    def __init__(self, beta: float = 1.0) -> None:
        self._beta = beta

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return the score with its sign turned."""
        mean = candidates.requests.mean()
        relative = (candidates.requests - mean) / max(1.0, mean)
        costs: Floats = self._beta * relative - candidates.hits / max(ask.num_tokens, 1)
        return costs
