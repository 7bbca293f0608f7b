"""The default cost: the seconds that a choice costs all requests on a replica. It has no weights to tune.

The time per prompt token is measured. Each token that a request has to compute delays this request and all others on
the replica, queued or decoding; their number is taken as the fleet's mean. So an idle fleet minimises time to first
token; the busier it is, the more a hit outweighs a queue, which keeps misses from causing more misses.

Prompts in flight count as hits, so equal prompts of a cold burst stay together. A replica that recently got more than
its share of tokens is charged for the excess as for tokens to compute. So a hot prefix is copied once its replica's
share is used up and not before, and no replica starves or computes much more than the mean.
"""

from __future__ import annotations

import numpy as np

from ..cost import Candidates, Floats, RouteRequest, StatelessCost

#: A replica's share is the mean plus this fraction of it, plus half of the request's prompt, so that a single request
#: is no imbalance. Both were tuned on the loads A, B and C, at two speeds (docs/fleet.md).
SLACK = 0.03
ROOM = 0.5


class Robust(StatelessCost):
    """Lowest `queued + (1 + mean requests) * (to compute + excess over the share)`, in seconds."""

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        seconds = candidates.seconds_a_token
        missing = seconds * (request.num_tokens - np.maximum(candidates.hits, candidates.coming))
        given = seconds * candidates.work
        share = (1 + SLACK) * given.mean() + ROOM * request.num_tokens * seconds.mean()
        excess = (given + missing - share).clip(0)
        costs: Floats = seconds * candidates.uncached + (1 + candidates.requests.mean()) * (missing + excess)
        return costs
