"""Hints that someone who knows the trace would give: sessions that are over, and when the others come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..arguments import require_int, require_number
from ..errors import InvalidArgument
from .references import References

#: What may be said of a session: that it is over, and when its next turn comes.
KINDS = ("over", "wait")
#: What `SaidHints.kind` has.
NOTHING, OVER, WAIT = 0, 1, 2
#: Of the logarithm of a wait: at 10, one hint in two is off by a factor of 850.
MAX_ERROR = 10.0


@dataclass(frozen=True, slots=True)
class SaidHints:
    """What is said of a request's session when the request has ended.

    kind: (R,) int64: NOTHING, OVER or WAIT. back_at: (R,) int64, when its next turn is said to come, in the unit of
    `now`; 0 unless WAIT. now: (R,) int64, when each request arrives, in microseconds; or, of a trace whose requests all
    arrive at one time, each a second after the one before.
    """

    kind: NDArray[np.int64]
    back_at: NDArray[np.int64]
    now: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HintOracle:
    """Who gives hints, how many and how good. What it says is determined by the seed.

    kinds: of `KINDS`. After the last request of a session it says "over", before each next turn when that comes.
    coverage: share of the sessions that give hints, 0 to 1. error: each wait is multiplied by a lognormal factor whose
    logarithm has this standard deviation, 0 to 10: 1 is a factor of 2.7 to either side. wrong: share of the hints that
    say the opposite: of a session that is over, that it comes back after some wait of the trace; of one that comes
    back, that it is over. A hint of a kind that is not among `kinds` is not given. With 1 all hints are lies.

    Raises `InvalidArgument` for values outside their limits.
    """

    kinds: tuple[str, ...] = KINDS
    coverage: float = 1.0
    error: float = 0.0
    wrong: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require_kinds(self.kinds, ",".join(self.kinds))
        _require_up_to("hint_coverage", self.coverage, 1)
        _require_up_to("hint_error", self.error, MAX_ERROR)
        _require_up_to("hint_wrong", self.wrong, 1)
        require_int("hint_seed", self.seed, 0, 2**63 - 1)

    @property
    def words(self) -> str:
        """What is said, by whom: "over and wait, by 50 % of the sessions; waits typically off by a factor of 2.72"."""
        words = f"{' and '.join(self.kinds)}, by {100 * self.coverage:g} % of the sessions"
        if self.error:
            words += f"; waits typically off by a factor of {np.exp(self.error):.3g}"
        return f"{words}; {100 * self.wrong:g} % wrong" if self.wrong else words

    def say(self, references: References) -> SaidHints:
        """Return the hints of a trace that was read `with_sessions`. O(requests).

        Raises `InvalidArgument` for one that was read without.
        """
        sessions = references.sessions
        if len(sessions) != len(references.starts) - 1:
            raise InvalidArgument("references have no sessions; read them with_sessions=True")
        now = _times(references.arrivals)
        following = next_turns(sessions)
        comes_back = following >= 0
        waits = np.where(comes_back, now[following] - now, 0)
        draws = np.random.default_rng(self.seed)
        gives = draws.random(int(sessions.max(initial=-1)) + 1)[sessions] < self.coverage
        is_wrong = draws.random(len(sessions)) < self.wrong
        factors = np.exp(draws.normal(0, self.error, len(sessions)))
        if comes_back.any():
            some_wait = draws.choice(waits[comes_back], len(sessions))
            waits = np.where(comes_back, waits, some_wait)
        kind = np.where(comes_back ^ is_wrong, WAIT, OVER)
        for name, number in (("over", OVER), ("wait", WAIT)):
            if name not in self.kinds:
                kind[kind == number] = NOTHING
        kind[~gives] = NOTHING
        farthest = 2 * int(now.max(initial=0)) + 1
        back_at = now + np.minimum(waits * factors, farthest).astype(np.int64)
        return SaidHints(kind.astype(np.int64), np.where(kind == WAIT, back_at, 0), now)


def parse_kinds(text: str) -> tuple[str, ...]:
    """Return the kinds in a list like "over,wait", in order, each once. Raises `InvalidArgument` for any other word."""
    kinds = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    _require_kinds(kinds, text)
    return kinds


def _require_kinds(kinds: tuple[str, ...], shown: str) -> None:
    if not kinds or set(kinds) - set(KINDS):
        raise InvalidArgument(f"hints is {shown!r}; it must have {' or '.join(KINDS)}, or both")


def _require_up_to(name: str, value: object, high: float) -> None:
    if not 0 <= require_number(name, value) <= high:
        raise InvalidArgument(f"{name} is {value}; it must be from 0 to {high:g}")


def _times(arrivals: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(arrivals) and arrivals[-1] > arrivals[0]:
        return arrivals
    return np.arange(len(arrivals), dtype=np.int64) * 1_000_000


def next_turns(sessions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find for each request the next one of its session, or -1. O(requests * log requests)."""
    order = np.argsort(sessions, kind="stable")
    following = np.full(len(sessions), -1, np.int64)
    same = sessions[order[:-1]] == sessions[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    return following
