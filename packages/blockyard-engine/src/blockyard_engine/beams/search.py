"""One beam search: finds the most likely continuations of a prompt; beams fork and end block by block.

The algorithm is transformers' (`generate(num_beams=...)`), so hypotheses and scores can be compared. Of the accumulated
log probabilities of all continuations of all beams, the best are kept: at least twice as many as beams, so that enough
remain when some end. A score is the sum divided by the number of new tokens to the power of `length_penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from blockyard import KVCacheManager
from blockyard.arguments import require_int, require_number
from blockyard.config import CacheConfig
from blockyard.errors import InvalidArgument

from ..decoding.text import GeneratedText
from ..results import Completion, FinishReason

MAX_BEAMS = 64


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Options of a beam search.

    Args:
        num_beams: number of beams, 1 to 64 and at most max_num_seqs.
        max_tokens: maximum number of new tokens.
        length_penalty: above 0 favours long answers, below 0 short ones.
        early_stopping: True stops when `num_beams` hypotheses have ended; False when the best running beam, at its
            present length, is no better than the worst of them; "never" when it cannot become better.
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
    """Ended beams, best first, at most `num_beams`."""

    options: BeamOptions
    ended: list[tuple[float, list[int], FinishReason]] = field(default_factory=list)
    #: Whether running beams may still become better than the worst of those that ended.
    is_open: bool = True

    def add(self, beams: list[tuple[float, list[int], FinishReason]]) -> None:
        """Add the beams that ended in a step, and keep the best.

        Args:
            beams: sum of log probabilities, tokens and reason of each.
        """
        if self.is_closed:
            return
        self.ended += [(self.score(total, len(tokens)), tokens, reason) for total, tokens, reason in beams]
        self.ended.sort(key=lambda hypothesis: -hypothesis[0])
        del self.ended[self.options.num_beams :]

    def score(self, total: float, num_tokens: int) -> float:
        """Return total / num_tokens ** length_penalty."""
        return total / float(num_tokens**self.options.length_penalty)

    @property
    def is_closed(self) -> bool:
        """True if no further hypotheses are added."""
        return not self.is_open or (self.options.early_stopping is True and self._is_full)

    def note_best_running(self, total: float, num_tokens: int) -> None:
        """Close the search if the best running beam cannot beat the worst ended one.

        With "never", and a penalty that favours length, the beam is judged at the maximum length.
        """
        longest = self.options.early_stopping == "never" and self.options.length_penalty > 0
        reachable = self.score(total, self.options.max_tokens if longest else num_tokens)
        if self._is_full and reachable <= self.ended[-1][0]:
            self.is_open = False

    @property
    def _is_full(self) -> bool:
        return len(self.ended) == self.options.num_beams


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam extended by one token.

    Attributes:
        parent: index of the beam.
        token_ids: new tokens.
        total: sum of log probabilities.
        is_ended: whether the token ends the beam.
    """

    parent: int
    token_ids: list[int]
    total: float
    is_ended: bool


class BeamSearch:
    """A search between two steps: running beams and ended hypotheses.

    `seqs` has the beams' handles in the cache; it is empty before the search has started.
    """

    def __init__(self, prompt: list[int], options: BeamOptions, eos_token_ids: frozenset[int]) -> None:
        self.prompt = prompt
        self.options = options
        self.seqs: list[int] = []
        self._beams = [Candidate(0, [], 0.0, False)]
        self._hypotheses = Hypotheses(options)
        self._eos_token_ids = eos_token_ids

    def token_ids(self) -> list[list[int]]:
        return [self.prompt + beam.token_ids for beam in self._beams]

    def advance(self, logprobs: torch.Tensor, cache: KVCacheManager) -> bool:
        """Choose the beams that continue, and fork and free them in the cache; return whether the search continues.

        Args:
            logprobs: log probabilities of the next tokens, float32 (beams, vocabulary).
            cache: the cache.
        """
        found = self._continue(logprobs)
        # Only the first candidates may end; the others are there to continue.
        ended = [candidate for candidate in found[: self.options.num_beams] if candidate.is_ended]
        stop, length = FinishReason.STOP, FinishReason.LENGTH
        reasons = [stop if one.token_ids[-1] in self._eos_token_ids else length for one in ended]
        self._hypotheses.add([(one.total, one.token_ids, why) for one, why in zip(ended, reasons, strict=True)])
        self._beams = [candidate for candidate in found if not candidate.is_ended][: self.options.num_beams]
        if not self._beams:
            return False
        self._hypotheses.note_best_running(self._beams[0].total, len(self._beams[0].token_ids))
        if self._hypotheses.is_closed:
            return False
        self.seqs = cache.regroup(self.seqs, [beam.parent for beam in self._beams])
        cache.append(self.seqs, [beam.token_ids[-1] for beam in self._beams])
        return True

    def completions(self, tokenizer: Any) -> list[Completion]:
        """Return the hypotheses, best first."""
        return [
            Completion(index, _text(tokens, tokenizer), tokens, reason, None, score)
            for index, (score, tokens, reason) in enumerate(self._hypotheses.ended)
        ]

    def _continue(self, logprobs: torch.Tensor) -> list[Candidate]:
        """Return the best continuations, best first: enough that `num_beams` continue even if the others end."""
        totals = logprobs + torch.tensor([[beam.total] for beam in self._beams], device=logprobs.device)
        count = min(max(2, 1 + len(self._eos_token_ids)) * self.options.num_beams, totals.numel())
        best = totals.flatten().topk(count)
        found = []
        for total, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token = divmod(index, logprobs.shape[1])
            tokens = [*self._beams[parent].token_ids, token]
            is_ended = token in self._eos_token_ids or len(tokens) == self.options.max_tokens
            found.append(Candidate(parent, tokens, total, is_ended))
        return found


def _text(token_ids: list[int], tokenizer: Any) -> str:
    text = GeneratedText(tokenizer, ())
    for token_id in token_ids:
        text.push(token_id)
    text.finish()
    return text.text
