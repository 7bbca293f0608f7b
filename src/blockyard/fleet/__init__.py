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
    from .state import Fleet

__all__ = ["Ask", "Candidates", "Choice", "Cost", "Fleet", "PlainCost", "Router", "Shares", "Why", "make_cost"]


def __getattr__(name: str) -> Any:
    """Import `Fleet` when it is first asked for: it needs the extra `events`, and the lab does not."""
    if name != "Fleet":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .state import Fleet

    return Fleet
