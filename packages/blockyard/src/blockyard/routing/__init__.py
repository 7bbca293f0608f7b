"""A fleet's router says which replica takes a request, by what each one holds, and why (`Fleet`: extra `events`).

Read it in this order:

    asking       what a cost is asked: a request, and the candidates as arrays
    costs        ways to choose; `robust` is ours
    book         load in tokens, by request and replica; speeds
    prefixes     beginnings of prompts, and who was sent them
    shares       what tenants may hold of each replica's pool
    router       a choice, booked; knows no sockets
    state        the same over replicas that are followed by their KV events
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .asking import Ask, Candidates, Cost, PlainCost
from .costs import make_cost
from .router import Choice, Router, Why
from .shares import Shares

if TYPE_CHECKING:
    from .state import Addresses, Fleet, ReplicaStatus

from .costs import COSTS

__all__ = [
    "COSTS",
    "Addresses",
    "Ask",
    "Candidates",
    "Choice",
    "Cost",
    "Fleet",
    "PlainCost",
    "ReplicaStatus",
    "Router",
    "Shares",
    "Why",
    "make_cost",
]


def __getattr__(name: str) -> Any:
    """Import what follows replicas by their events when it is first used: it needs the extra `events`."""
    if name not in ("Addresses", "Fleet", "ReplicaStatus"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import state

    return getattr(state, name)
