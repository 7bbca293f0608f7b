"""Costs of others that weigh the hits that replicas report against their load."""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Candidates, Floats, PlainCost

#: What a hit counts that is not on the GPU but in the host's memory.
HOST_CREDIT = 0.75


def to_compute(ask: Ask, candidates: Candidates) -> Floats:
    """Return the tokens that each would compute, those queued there too; hits outside the GPU count for less."""
    hits = candidates.gpu_hits + HOST_CREDIT * (candidates.hits - candidates.gpu_hits)
    missing: Floats = (candidates.uncached + ask.num_tokens - hits).clip(0)
    return missing


class Dynamo(PlainCost):
    """Takes the least of `scale * (blocks to compute, with those queued) + blocks held`; temperature 0, its default.

    NVIDIA Dynamo's kv_router, 2026.
    """

    def __init__(self, prefill_load_scale: float = 1.0) -> None:
        self._scale = prefill_load_scale

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return tokens, which order replicas as blocks do."""
        return self._scale * to_compute(ask, candidates) + candidates.held + ask.num_tokens


class LMetric(PlainCost):
    """Takes the least product of tokens to compute, with those queued, and requests there with this one.

    Dynamo's other rule.
    """

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return tokens times requests."""
        return to_compute(ask, candidates) * (candidates.requests + 1)


#: Share of the prompt that a replica must have to be kept by the filter.
AFFINITY = 0.80
#: Seconds to the first token by which the kept may be behind the others.
MOST_PENALTY = 18.0


class LlmD(PlainCost):
    """Keeps the replicas that have 0.80 of the prompt, unless they are 18 s behind, and takes the least loaded.

    llm-d's precise prefix routing (its guide, July 2026).
    """

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return the tokens in flight, inf for what the filter drops."""
        loads = candidates.held.astype(np.float64)
        keeps = candidates.hits >= AFFINITY * ask.num_tokens
        if keeps.any() and not keeps.all():
            first_token = candidates.seconds_a_token * (candidates.uncached + ask.num_tokens - candidates.hits)
            if first_token[keeps].min() - first_token.min() <= MOST_PENALTY:
                loads[~keeps] = np.inf
        return loads


class ProductionStack(PlainCost):
    """Takes the most of `matched / prompt - beta * (load - mean load) / max(1, mean load)`, load in requests.

    vLLM production-stack's `loadaware` routing (its pull request 1035, August 2026).
    """

    def __init__(self, beta: float = 1.0) -> None:
        self._beta = beta

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return the score with its sign turned."""
        mean = candidates.requests.mean()
        relative = (candidates.requests - mean) / max(1.0, mean)
        costs: Floats = self._beta * relative - candidates.hits / max(ask.num_tokens, 1)
        return costs
