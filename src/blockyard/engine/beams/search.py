"""One beam search: the likeliest continuations of a prompt, whose beams fork and end block by block.

The search is transformers' own (`generate(num_beams=...)`), so that hypotheses and scores can be compared: of the
accumulated log probabilities of all continuations of all beams the best are kept, twice as many as beams or more, so
that enough remain when some of them end; a score is the sum divided by the number of new tokens to the power of
`length_penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core.manager import KVCacheManager
from ..decoding.text import GeneratedText
from ..results import Completion, FinishReason
from .hypotheses import BeamOptions, Hypotheses


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
        """All known tokens of each beam, in the order of `seqs`."""
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
        """The hypotheses, best first."""
        return [
            Completion(index, _text(tokens, tokenizer), tokens, reason, None, score)
            for index, (score, tokens, reason) in enumerate(self._hypotheses.ended)
        ]

    def _continue(self, logprobs: torch.Tensor) -> list[Candidate]:
        """The best continuations, best first: enough that `num_beams` go on even if all others end."""
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
