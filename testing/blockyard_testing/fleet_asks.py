"""Requests and candidates for routers, written short."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockyard.routing import Candidates, Choice, Cost, Router, RouteRequest

LINK = 16


def ask(name: str = "request", num_tokens: int = 160, **more: Any) -> RouteRequest:
    """A request whose links are those of a prompt like no other, unless they are given."""
    more = {"links": [(name, place) for place in range(num_tokens // LINK)], "link_tokens": LINK} | more
    return RouteRequest(name, num_tokens, **more)


def candidates(num_replicas: int = 3, **columns: list[float]) -> Candidates:
    """Idle replicas that have nothing, but for the columns given."""
    integers = ("hits", "gpu_hits", "coming", "waiting", "uncached", "requests", "held")
    arrays: dict[str, Any] = {name: np.array(columns.get(name, [0] * num_replicas), np.int64) for name in integers}
    arrays["gpu_hits"] = arrays["gpu_hits"] if "gpu_hits" in columns else arrays["hits"].copy()
    work = np.array(columns.get("work", [0.0] * num_replicas), np.float64)
    speeds = np.array(columns.get("seconds_a_token", [1e-4] * num_replicas), np.float64)
    names = [f"replica-{number}" for number in range(num_replicas)]
    return Candidates(names, np.ones(num_replicas, np.bool_), work=work, seconds_a_token=speeds, **arrays)


def router(cost: Cost, num_replicas: int = 3) -> Router:
    made = Router(cost)
    for number in range(num_replicas):
        made.add(f"replica-{number}")
    return made


def choose(made: Router, asked: RouteRequest, hits: list[int] | None = None, **more: Any) -> Choice:
    """A choice where every replica is believed, and has nothing unless it is said."""
    count = len(made.replicas)
    known = np.array(hits or [0] * count, np.int64)
    return made.choose(asked, known, known, np.ones(count, np.bool_), **more)
