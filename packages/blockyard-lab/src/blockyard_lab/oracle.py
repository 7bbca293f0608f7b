"""Hints that someone who knows the trace would give: which sessions are over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument

from .references import References


@dataclass(frozen=True, slots=True)
class HintOracle:
    """Says after the last request of a session that the session is over. What it says is determined by the seed.

    coverage: share of the sessions that give hints, 0 to 1. wrong: share of the requests after which the opposite is
    said: nothing of a session that is over, and of one that comes back, that it is over. With 1 all hints are lies.

    Raises `InvalidArgument` for values outside their limits.
    """

    coverage: float = 1.0
    wrong: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require_share("hint_coverage", self.coverage)
        _require_share("hint_wrong", self.wrong)
        require_int("hint_seed", self.seed, 0, 2**63 - 1)

    @property
    def words(self) -> str:
        """What is said, by whom: "over, by 50 % of the sessions; 10 % wrong"."""
        words = f"over, by {100 * self.coverage:g} % of the sessions"
        return f"{words}; {100 * self.wrong:g} % wrong" if self.wrong else words

    def say(self, references: References) -> NDArray[np.int64]:
        """Return for each request 1 if its session is said to be over when the request has ended, else 0. O(requests).

        Raises `InvalidArgument` for a trace that was not read `with_sessions`.
        """
        sessions = references.sessions
        if len(sessions) != len(references.starts) - 1:
            raise InvalidArgument("references have no sessions; read them with_sessions=True")
        comes_back = next_turns(sessions) >= 0
        draws = np.random.default_rng(self.seed)
        gives = draws.random(int(sessions.max(initial=-1)) + 1)[sessions] < self.coverage
        is_wrong = draws.random(len(sessions)) < self.wrong
        is_over: NDArray[np.int64] = (gives & ~(comes_back ^ is_wrong)).astype(np.int64)
        return is_over


def _require_share(name: str, value: object) -> None:
    if not 0 <= require_number(name, value) <= 1:
        raise InvalidArgument(f"{name} is {value}; it must be from 0 to 1")


def next_turns(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find for each request the next one of its session, or -1. O(requests * log requests)."""
    order = np.argsort(sessions, kind="stable")
    following = np.full(len(sessions), -1, np.int64)
    same = sessions[order[:-1]] == sessions[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following
