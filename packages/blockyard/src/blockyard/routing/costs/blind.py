"""Costs that ignore what replicas have cached."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from ..cost import Bools, Candidates, Floats, RouteRequest, StatelessCost


def two_choices(draw: np.random.Generator, candidates: Candidates, is_meant: Bools) -> Floats:
    """Draw two of the replicas in `is_meant`; return their number of requests, inf for all others."""
    costs: Floats = np.full(len(candidates.names), np.inf)
    meant = np.flatnonzero(is_meant)
    drawn = draw.choice(meant, min(2, len(meant)), replace=False)
    costs[drawn] = candidates.requests[drawn]
    return costs


class PowerOfTwo(StatelessCost):
    """The less busy of two random replicas (Mitzenmacher, 2001); Ray Serve's default."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:  # noqa: ARG002
        return two_choices(self._draw, candidates, np.ones(len(candidates.names), np.bool_))


class RoundRobin(StatelessCost):
    """The replica that got its last request the longest ago."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:  # noqa: ARG002
        return np.array([self._turns.get(name, 0) for name in candidates.names], np.float64)

    def record(self, request: RouteRequest, replica: str) -> None:  # noqa: ARG002
        self._turn += 1
        self._turns[replica] = self._turn

    def forget(self, replica: str) -> None:
        self._turns.pop(replica, None)


class SessionHash(StatelessCost):
    """The replica whose hash with the session is lowest. A request without a session counts as a session.

    By rendezvous hashing (Thaler and Ravishankar, 1998), few sessions move when replicas are added or removed.
    """

    def costs(self, request: RouteRequest, candidates: Candidates) -> Floats:
        who = request.session or request.name
        return np.array([_hash(f"{who}\n{name}") for name in candidates.names], np.float64)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big")
