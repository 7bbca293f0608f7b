"""llm-d's precise prefix routing filters by affinity, then takes the least in flight (its guide, July 2026)."""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Candidates, Floats, PlainCost

#: Share of the prompt that a replica must have to be kept by the filter.
AFFINITY = 0.80
#: Seconds to the first token by which the kept may be behind the others.
MOST_PENALTY = 18.0


class LlmD(PlainCost):
    """Keeps the replicas that have 0.80 of the prompt, unless they are 18 s behind, and takes the least loaded."""

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return the tokens in flight, inf for what the filter drops."""
        loads = candidates.held.astype(np.float64)
        keeps = candidates.hits >= AFFINITY * ask.num_tokens
        if keeps.any() and not keeps.all():
            first_token = candidates.seconds_a_token * (candidates.uncached + ask.num_tokens - candidates.hits)
            if first_token[keeps].min() - first_token.min() <= MOST_PENALTY:
                loads[~keeps] = np.inf
        return loads
