"""Costs of other routers that weigh hits, from KV events, against load."""

from __future__ import annotations

import numpy as np

from ..cost import Candidates, Floats, RouteRequest, StatelessCost

#: Weight of a hit in host memory, relative to one on the GPU.
HOST_CREDIT = 0.75


def to_compute(request: RouteRequest, candidates: Candidates) -> Floats:
    """Return the tokens that each candidate has to compute, queued ones included. Hits off the GPU count for less."""
    hits = candidates.gpu_hits + HOST_CREDIT * (candidates.hits - candidates.gpu_hits)
    missing: Floats = (candidates.uncached + request.num_tokens - hits).clip(0)
    return missing


class Dynamo(StatelessCost):
    """Lowest `scale * (tokens to compute, queued ones included) + tokens held`: NVIDIA Dynamo's kv_router, 2026.

    Tokens order replicas as Dynamo's blocks do. Its default temperature is 0.
    """

    def __init__(self, prefill_load_scale: float = 1.0) -> None:
        self._scale = prefill_load_scale

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        return self._scale * to_compute(request, candidates) + candidates.held + request.num_tokens


class LMetric(StatelessCost):
    """Lowest product of tokens to compute, queued ones included, and number of requests. Dynamo's other rule."""

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        return to_compute(request, candidates) * (candidates.requests + 1)


#: Fraction of the prompt that a replica must hold to pass the filter.
AFFINITY = 0.80
#: Most seconds by which the first token may be later than on the other replicas.
MOST_PENALTY = 18.0


class LlmD(StatelessCost):
    """The least loaded of the replicas that hold 0.80 of the prompt, unless their first token would be 18 s later.

    llm-d's precise prefix routing (its guide, July 2026).
    """

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        loads = candidates.held.astype(np.float64)
        keeps = candidates.hits >= AFFINITY * request.num_tokens
        if keeps.any() and not keeps.all():
            first_token = candidates.seconds_a_token * (candidates.uncached + request.num_tokens - candidates.hits)
            if first_token[keeps].min() - first_token.min() <= MOST_PENALTY:
                loads[~keeps] = np.inf
        return loads


class ProductionStack(StatelessCost):
    """Highest `matched / prompt - beta * (load - mean load) / max(1, mean load)`, with load in requests.

    vLLM production-stack's `loadaware` routing (its pull request 1035, August 2026).
    """

    def __init__(self, beta: float = 1.0) -> None:
        self._beta = beta

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        mean = candidates.requests.mean()
        relative = (candidates.requests - mean) / max(1.0, mean)
        costs: Floats = self._beta * relative - candidates.hits / max(request.num_tokens, 1)
        return costs
