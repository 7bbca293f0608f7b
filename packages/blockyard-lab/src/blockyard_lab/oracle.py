"""Hints of an oracle that knows the whole trace: which sessions are over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument

from .references import References


@dataclass(frozen=True, slots=True)
class HintOracle:
    """Announces after a session's last request that the session is over. Determined by the seed.

    Args:
        coverage: fraction of the sessions that send hints, 0 to 1.
        wrong: fraction of their requests with an inverted hint: none after the last request, "over" after any other.
        seed: chooses sessions and wrong hints.

    Raises:
        InvalidArgument: for values outside their limits.
    """

    coverage: float = 1.0
    wrong: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, share in (("hint_coverage", self.coverage), ("hint_wrong", self.wrong)):
            if not 0 <= require_number(name, share) <= 1:
                raise InvalidArgument(f"{name} is {share}; it must be from 0 to 1")
        require_int("hint_seed", self.seed, 0, 2**63 - 1)

    @property
    def description(self) -> str:
        """Which hints are sent: "over, by 50 % of the sessions; 10 % wrong"."""
        words = f"over, by {100 * self.coverage:g} % of the sessions"
        return f"{words}; {100 * self.wrong:g} % wrong" if self.wrong else words

    def mark_ends(self, references: References) -> NDArray[np.int64]:
        """Return for each request 1 if the hint after it says that its session is over, else 0. O(requests).

        Raises:
            InvalidArgument: if `references` were read without sessions.
        """
        sessions = references.sessions
        if len(sessions) != len(references.starts) - 1:
            raise InvalidArgument("references have no sessions; read them by read_references(..., with_sessions=True)")
        comes_back = next_turns(sessions) >= 0
        draws = np.random.default_rng(self.seed)
        gives = draws.random(int(sessions.max(initial=-1)) + 1)[sessions] < self.coverage
        is_wrong = draws.random(len(sessions)) < self.wrong
        is_over: NDArray[np.int64] = (gives & ~(comes_back ^ is_wrong)).astype(np.int64)
        return is_over


def next_turns(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each request the index of its session's next request, or -1. O(requests * log requests)."""
    order = np.argsort(sessions, kind="stable")
    following = np.full(len(sessions), -1, np.int64)
    same = sessions[order[:-1]] == sessions[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following
