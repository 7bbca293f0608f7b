"""Ours is the seconds that a choice costs all who are there: one unit, and no weight to tune per load.

A prompt token takes a replica some seconds (measured). Every token that a request makes it compute is waited for by
that request, and by those that are with it on a replica, in the queue or decoding: as many as the fleet has on average.
So where the fleet is idle the cost is the time to the first token, and the busier it is, the more a hit counts against
a queue: misses do not breed misses.

What is in flight counts as a hit: equal prompts of a cold burst stay together. A replica that was given more than its
share of late is charged for the excess as for tokens to compute. So cheap moves come first, a hot prefix is copied when
its replica's share is used up and not before, and no replica starves or computes much more than the mean.
"""

from __future__ import annotations

import numpy as np

from ..asking import Ask, Candidates, Floats, PlainCost

#: A replica's share is the mean and this much of it, and half a prompt of the request's length: what one request does
#: to the sums is no imbalance yet. Both were set on the loads A, B and C, at two speeds (docs/fleet.md).
SLACK = 0.03
ROOM = 0.5


class Robust(PlainCost):
    """Takes the least of `queued + (1 + mean requests) * (to compute + excess over the share)`, in seconds."""

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return seconds. A dozen operations on arrays."""
        seconds = candidates.seconds_a_token
        missing = seconds * (ask.num_tokens - np.maximum(candidates.hits, candidates.coming))
        given = seconds * candidates.work
        share = (1 + SLACK) * given.mean() + ROOM * ask.num_tokens * seconds.mean()
        excess = (given + missing - share).clip(0)
        costs: Floats = seconds * candidates.uncached + (1 + candidates.requests.mean()) * (missing + excess)
        return costs
