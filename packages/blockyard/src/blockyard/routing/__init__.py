"""Request routing: choose the replica of a fleet that holds most of the prompt (`Fleet` needs the extra `events`).

Read it in this order:

    cost         interface of a cost: a request, and the candidates as arrays
    costs        the cost functions; `robust` is the default
    load         requests in flight, load in tokens, measured speeds
    prefixes     which replica was sent which beginnings of prompts
    shares       tenants' shares of each replica's pool
    router       choices and bookkeeping, without sockets
    state        `Fleet`: a router over replicas that are followed by their KV events
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cost import Candidates, Cost, RouteRequest, StatelessCost
from .costs import make_cost
from .router import CandidateScore, Choice, Router
from .shares import Shares

if TYPE_CHECKING:
    from .state import Addresses, Fleet, ReplicaStatus

from .costs import COSTS

__all__ = [
    "COSTS",
    "Addresses",
    "CandidateScore",
    "Candidates",
    "Choice",
    "Cost",
    "Fleet",
    "ReplicaStatus",
    "RouteRequest",
    "Router",
    "Shares",
    "StatelessCost",
    "make_cost",
]


def __getattr__(name: str) -> Any:
    """Import the classes that need the extra `events` on first use."""
    if name not in ("Addresses", "Fleet", "ReplicaStatus"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import state

    return getattr(state, name)
