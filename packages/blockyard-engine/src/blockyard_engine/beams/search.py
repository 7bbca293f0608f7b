"""One beam search: the likeliest continuations of a prompt, whose beams fork and end block by block.

The search is transformers' own (`generate(num_beams=...)`), so that hypotheses and scores can be compared: of the
accumulated log probabilities of all continuations of all beams the best are kept, twice as many as beams or more, so
that enough remain when some of them end; a score is the sum divided by the number of new tokens to the power of
`length_penalty`.
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
        """Return what hypotheses are compared by."""
        return total / float(num_tokens**self.options.length_penalty)

    @property
    def is_closed(self) -> bool:
        """Return whether nothing more is taken in."""
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam continued by a token. parent: place of the beam. total: sum of log probabilities."""

    parent: int
    token_ids: list[int]
    total: float
    is_ended: bool


class BeamSearch:
    """A search between two steps: the beams that go on, and the hypotheses that ended.

    seqs: the beams' handles in the cache; as long as there are none, the search has not begun.
    """

    def __init__(self, prompt: list[int], options: BeamOptions, eos_token_ids: frozenset[int]) -> None:
        self.prompt = prompt
        self.options = options
        self.seqs: list[int] = []
        self._beams = [Candidate(0, [], 0.0, False)]
        self._hypotheses = Hypotheses(options)
        self._eos_token_ids = eos_token_ids

    def token_ids(self) -> list[list[int]]:
        """Return all known tokens of each beam, in the order of `seqs`."""
        return [self.prompt + beam.token_ids for beam in self._beams]

    def advance(self, logprobs: torch.Tensor, cache: KVCacheManager) -> bool:
        """Choose who goes on, and fork and end the beams in the cache; returns whether the search goes on.

        logprobs: float32 (beams, vocabulary), of what follows each beam.
        """
        found = self._continue(logprobs)
        # The candidates behind the first are there to go on only.
        ended = [candidate for candidate in found[: self.options.num_beams] if candidate.is_ended]
        self._hypotheses.add([(one.total, one.token_ids, self._reason(one)) for one in ended])
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
        """Return the best continuations, best first: enough that `num_beams` go on even if all others end."""
        totals = logprobs + torch.tensor([[beam.total] for beam in self._beams], device=logprobs.device)
        count = min(max(2, 1 + len(self._eos_token_ids)) * self.options.num_beams, totals.numel())
        best = totals.flatten().topk(count)
        found = []
        for total, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token = divmod(place, logprobs.shape[1])
            tokens = [*self._beams[parent].token_ids, token]
            is_ended = token in self._eos_token_ids or len(tokens) == self.options.max_tokens
            found.append(Candidate(parent, tokens, total, is_ended))
        return found

    def _reason(self, ended: Candidate) -> FinishReason:
        return FinishReason.STOP if ended.token_ids[-1] in self._eos_token_ids else FinishReason.LENGTH


def _text(token_ids: list[int], tokenizer: Any) -> str:
    text = GeneratedText(tokenizer, ())
    for token_id in token_ids:
        text.push(token_id)
    text.finish()
    return text.text
