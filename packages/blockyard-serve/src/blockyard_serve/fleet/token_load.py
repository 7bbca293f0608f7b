"""Autoscaling by load in tokens: a policy for Ray Serve that does not import Ray.

AutoscalingConfig(min_replicas=1, max_replicas=8, policy=AutoscalingPolicy(
    policy_function="blockyard_serve.fleet.token_load:TokenLoad", policy_kwargs={"target": 0.8}))
"""

from __future__ import annotations

from typing import Any

from blockyard.arguments import require_number
from blockyard.errors import InvalidArgument

#: The name under which a replica reports its load (`record_autoscaling_stats`).
TOKEN_LOAD = "token_load"


class TokenLoad:
    """Chooses the number of replicas that keeps each one's load at a target. Ray bounds and delays the decision.

    The load of a replica is the tokens of its requests, with answers at full length, relative to the tokens that its
    pool can hold: at 1 the pool is fully reserved, above 1 requests wait.

    Args:
        target: load of each replica; above 0.
    """

    def __init__(self, target: float = 0.8) -> None:
        self._target = require_number("target", target)
        if self._target <= 0:
            raise InvalidArgument(f"target is {target}; it must be above 0")

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, usually a fraction, and no state. Without reports, the current number."""
        loads = (context.aggregated_metrics or {}).get(TOKEN_LOAD)
        if not loads:
            return context.target_num_replicas, {}
        return sum(loads.values()) / self._target, {}
