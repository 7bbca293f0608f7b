"""This says how many replicas a load in tokens wants: a policy for Ray Serve's autoscaling that imports nothing of Ray.

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
    """Wants as many replicas as keep the load of each at a target.

    The load of a replica is the tokens of its requests, prompts and answers at their longest, over those that its pool
    takes: at 1 the pool is spoken for, above it requests wait. Ray bounds and delays what this says.

    Raises `InvalidArgument` for a target that is not above 0.
    """

    def __init__(self, target: float = 0.8) -> None:
        self._target = require_number("target", target)
        if self._target <= 0:
            raise InvalidArgument(f"target is {target}; it must be above 0")

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return how many replicas are wanted, a fraction as a rule, and no state; what there is, until one reports."""
        loads = (context.aggregated_metrics or {}).get(TOKEN_LOAD)
        if not loads:
            return context.target_num_replicas, {}
        return sum(loads.values()) / self._target, {}
