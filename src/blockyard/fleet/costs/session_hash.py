"""Sessions are hashed by rendezvous (Thaler and Ravishankar, 1998): few of them move when replicas do."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from ..asking import Ask, Candidates, Floats, PlainCost


class SessionHash(PlainCost):
    """Takes the replica whose hash with the session is least; a request without one is its own session."""

    def costs(self, ask: Ask, candidates: Candidates) -> Floats:
        """Return the hashes."""
        who = ask.session or ask.name
        return np.array([_hash(f"{who}\n{name}") for name in candidates.names], np.float64)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest(), "big")
