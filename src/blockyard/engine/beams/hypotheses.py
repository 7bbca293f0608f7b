"""What a beam search wants, and the best of what it found so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...arguments import require_int, require_number
from ...config import CacheConfig
from ...errors import InvalidArgument
from ..results import FinishReason

MAX_BEAMS = 64


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """num_beams: 1 to 64, and at most the sequences that run at once. max_tokens: new tokens at most.

    length_penalty: above 0 favours long answers, below 0 short ones. early_stopping: True ends when `num_beams`
    hypotheses have ended; False when the best running beam is, at its present length, no better than the worst of them;
    "never" when it cannot become better.
    """

    num_beams: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def check(self, config: CacheConfig) -> None:
        """Raise `InvalidArgument` for values outside their limits."""
        require_int("num_beams", self.num_beams, 1, min(MAX_BEAMS, config.max_num_seqs))
        require_int("max_tokens", self.max_tokens, 1, config.max_model_len)
        require_number("length_penalty", self.length_penalty)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidArgument(f"early_stopping is {self.early_stopping!r}; it must be True, False or 'never'")


@dataclass(slots=True)
class Hypotheses:
    """Ended beams, best first, at most `num_beams`. A score is total / length ** length_penalty."""

    options: BeamOptions
    ended: list[tuple[float, list[int], FinishReason]] = field(default_factory=list)
    #: Whether running beams may still become better than the worst of those that ended.
    is_open: bool = True

    def add(self, ended: list[tuple[float, list[int], FinishReason]]) -> None:
        """Take in the beams (total, tokens, reason) that ended in a step; the best of all stay."""
        if self.is_closed:
            return
        self.ended += [(self.score(total, len(tokens)), tokens, reason) for total, tokens, reason in ended]
        self.ended.sort(key=lambda hypothesis: -hypothesis[0])
        del self.ended[self.options.num_beams :]

    def score(self, total: float, num_tokens: int) -> float:
        """What hypotheses are compared by."""
        return total / float(num_tokens**self.options.length_penalty)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is taken in."""
        return not self.is_open or (self.options.early_stopping is True and self._is_full)

    def note_best_running(self, total: float, num_tokens: int) -> None:
        """Close the search for good if the best running beam cannot reach the worst of the ended ones.

        num_tokens: its new tokens. "never" gives it the benefit of the longest answer where length is rewarded.
        """
        longest = self.options.early_stopping == "never" and self.options.length_penalty > 0
        reachable = self.score(total, self.options.max_tokens if longest else num_tokens)
        if self._is_full and reachable <= self.ended[-1][0]:
            self.is_open = False

    @property
    def _is_full(self) -> bool:
        return len(self.ended) == self.options.num_beams
