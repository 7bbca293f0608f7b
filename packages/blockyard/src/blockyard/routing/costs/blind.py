"""Costs that know nothing of what replicas have cached."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from ..asking import Ask, Bools, Candidates, Floats, PlainCost


def two_choices(draw: np.random.Generator, candidates: Candidates, is_meant: Bools) -> Floats:
    """Return the requests of two drawn from those meant, inf for others."""
    costs: Floats = np.full(len(candidates.names), np.inf)
    meant = np.flatnonzero(is_meant)
    drawn = draw.choice(meant, min(2, len(meant)), replace=False)
    costs[drawn] = candidates.requests[drawn]
    return costs


class PowerOfTwo(PlainCost):
    """Draws two replicas and takes the one with fewer requests (Mitzenmacher, 2001); Ray Serve's default."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:  # noqa: ARG002
        """Return requests of the two drawn, inf for others."""
        return two_choices(self._draw, candidates, np.ones(len(candidates.names), np.bool_))


class RoundRobin(PlainCost):
    """Takes the replica whose turn is the longest ago."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:  # noqa: ARG002
        """Return the number of each one's last turn."""
        return np.array([self._turns.get(name, 0) for name in candidates.names], np.float64)

    def sent(self, ask: Ask, replica: str) -> None:  # noqa: ARG002
        """Its turn is over."""
        self._turn += 1
        self._turns[replica] = self._turn

    def gone(self, replica: str) -> None:
        """Its turn comes no more."""
        self._turns.pop(replica, None)


class SessionHash(PlainCost):
    """Takes the replica whose hash with the session is least; a request without one is its own session.

    Few sessions move when replicas come and go: rendezvous hashing (Thaler and Ravishankar, 1998).
    """

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return the hashes."""
        who = ask.session or ask.name
        return np.array([_hash(f"{who}\n{name}") for name in candidates.names], np.float64)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big")
