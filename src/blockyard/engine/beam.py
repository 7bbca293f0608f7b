"""Beam search: the likeliest continuations of one prompt, whose beams fork and end block by block.

The search is transformers' own (`generate(num_beams=...)`), so that hypotheses and scores can be compared: of the
accumulated log probabilities of all continuations of all beams the best are kept, twice as many as beams or more, so
that enough remain when some of them end; a score is the sum divided by the number of new tokens to the power of
`length_penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..arguments import require_int, require_number
from ..core.manager import KVCacheManager
from ..errors import InvalidArgument, NeverFits
from .decoding.choosing import StepChooser
from .decoding.text import GeneratedText
from .moves import MoveQueue
from .results import Completion, FinishReason
from .runner import ForwardBatch, ModelRunner

MAX_BEAMS = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A beam continued by a token. parent: place of the beam. total: sum of log probabilities."""

    parent: int
    token_ids: list[int]
    total: float
    is_ended: bool


@dataclass(slots=True)
class Hypotheses:
    """Ended beams, best first, at most `num_beams`. A score is total / length ** length_penalty."""

    num_beams: int
    length_penalty: float
    early_stopping: bool | str
    max_tokens: int
    ended: list[tuple[float, list[int], FinishReason]] = field(default_factory=list)
    #: Whether running beams may still become better than the worst of those that ended.
    is_open: bool = True

    def add(self, ended: list[tuple[float, list[int], FinishReason]]) -> None:
        """Take in the beams (total, tokens, reason) that ended in a step; the best of all stay."""
        if not self.is_open or (self.early_stopping is True and self.is_full):
            return
        self.ended += [(self.score(total, len(tokens)), tokens, reason) for total, tokens, reason in ended]
        self.ended.sort(key=lambda hypothesis: -hypothesis[0])
        del self.ended[self.num_beams :]

    def score(self, total: float, num_tokens: int) -> float:
        """What hypotheses are compared by."""
        return total / float(num_tokens**self.length_penalty)

    @property
    def is_full(self) -> bool:
        """Whether as many have ended as are wanted."""
        return len(self.ended) == self.num_beams

    def note_best_running(self, total: float, num_tokens: int) -> None:
        """Close the search for good if the best running beam cannot reach the worst of the ended ones.

        num_tokens: its new tokens. "never" gives it the benefit of the longest answer where length is rewarded.
        """
        longest = self.early_stopping == "never" and self.length_penalty > 0
        reachable = self.score(total, self.max_tokens if longest else num_tokens)
        if self.is_full and reachable <= self.ended[-1][0]:
            self.is_open = False


class BeamSearch:
    """One search over a cache that serves nothing else meanwhile.

    num_beams: 1 to 64. max_tokens: new tokens at most. length_penalty: above 0 favours long answers, below 0 short
    ones. early_stopping: True ends when `num_beams` hypotheses have ended; False when the best running beam is, at its
    present length, no better than the worst of them; "never" when it cannot become better.
    Raises `InvalidArgument` for values outside their limits.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        runner: ModelRunner,
        moves: MoveQueue,
        num_beams: int,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
    ) -> None:
        most = min(MAX_BEAMS, cache.config.max_num_seqs)
        self._num_beams = require_int("num_beams", num_beams, 1, most)
        self._max_tokens = require_int("max_tokens", max_tokens, 1, cache.config.max_model_len)
        if early_stopping not in (True, False, "never"):
            raise InvalidArgument(f"early_stopping is {early_stopping!r}; it must be True, False or 'never'")
        penalty = require_number("length_penalty", length_penalty)
        self._hypotheses = Hypotheses(self._num_beams, penalty, early_stopping, self._max_tokens)
        self._cache = cache
        self._runner = runner
        self._moves = moves

    def require_fits(self, num_prompt_tokens: int) -> None:
        """Raise `NeverFits` if an empty cache could not hold all beams at their longest, sharing only the prompt."""
        config = self._cache.config
        num_tokens = num_prompt_tokens + self._max_tokens
        if num_tokens > config.max_model_len:
            raise NeverFits(f"the beams may reach {num_tokens} tokens; max_model_len is {config.max_model_len}")
        needed = 0
        for group in config.layer_groups:
            shared = num_prompt_tokens // group.block_size
            needed += shared + self._num_beams * (-(-num_tokens // group.block_size) - shared)
        usable = config.num_blocks - 1 - config.watermark_blocks
        if needed > usable:
            raise NeverFits(
                f"{self._num_beams} beams of {num_tokens} tokens may take {needed} blocks; {usable} are usable"
            )

    def run(self, prompt: list[int], eos_token_ids: frozenset[int], tokenizer: Any) -> list[Completion]:
        """The best continuations, best first. All blocks are given back, also if the model raises."""
        seqs: list[int] = []
        try:
            seqs.append(self._cache.allocate(prompt, "beam search", (), self._num_beams))
            self._search(seqs, prompt, eos_token_ids)
        finally:
            self._cache.free(seqs)
        return [
            Completion(index, _text(tokens, tokenizer), tokens, reason, None, score)
            for index, (score, tokens, reason) in enumerate(self._hypotheses.ended)
        ]

    def _search(self, seqs: list[int], prompt: list[int], eos_token_ids: frozenset[int]) -> None:
        """seqs: the beams' handles, which the caller frees; always those that the cache has."""
        beams = [Candidate(0, [], 0.0, False)]
        while True:
            logprobs = self._step(seqs, [prompt + beam.token_ids for beam in beams])
            found = self._continue(beams, logprobs, eos_token_ids)
            # The candidates behind the first are there to go on only.
            ended = [candidate for candidate in found[: self._num_beams] if candidate.is_ended]
            self._hypotheses.add([(one.total, one.token_ids, _reason(one, eos_token_ids)) for one in ended])
            beams = [candidate for candidate in found if not candidate.is_ended][: self._num_beams]
            if not beams:
                return
            self._hypotheses.note_best_running(beams[0].total, len(beams[0].token_ids))
            full = self._hypotheses.early_stopping is True and self._hypotheses.is_full
            if full or not self._hypotheses.is_open:
                return
            seqs[:] = self._cache.regroup(seqs, [beam.parent for beam in beams])
            self._cache.append(seqs, [beam.token_ids[-1] for beam in beams])

    def _step(self, seqs: list[int], token_ids: list[list[int]]) -> torch.Tensor:
        """Compute what the beams have new; returns log probabilities (beams, vocabulary) in float32."""
        done = [self._cache.num_computed_tokens(seq) for seq in seqs]
        counts = [len(tokens) - computed for tokens, computed in zip(token_ids, done, strict=True)]
        plan = self._cache.reserve(seqs, counts)
        self._moves.note(plan)
        if not plan.all_fit:
            raise NeverFits(f"the beams need more blocks than the {self._cache.config.num_blocks} of the pool")
        new = [tokens[computed:] for tokens, computed in zip(token_ids, done, strict=True)]
        batch = ForwardBatch.of(plan, self._cache.config.layer_groups, new, [1] * len(seqs))
        logits = self._runner.run(batch, self._moves)
        StepChooser(logits)  # refuses what is not finite
        self._cache.commit(seqs, counts)
        return logits.float().log_softmax(dim=-1)

    def _continue(
        self, beams: list[Candidate], logprobs: torch.Tensor, eos_token_ids: frozenset[int]
    ) -> list[Candidate]:
        """The best continuations, best first: enough that `num_beams` go on even if all others end."""
        totals = logprobs + torch.tensor([[beam.total] for beam in beams], device=logprobs.device)
        count = min(max(2, 1 + len(eos_token_ids)) * self._num_beams, totals.numel())
        best = totals.flatten().topk(count)
        found = []
        for total, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token = divmod(place, logprobs.shape[1])
            tokens = [*beams[parent].token_ids, token]
            is_ended = token in eos_token_ids or len(tokens) == self._max_tokens
            found.append(Candidate(parent, tokens, total, is_ended))
        return found


def _reason(ended: Candidate, eos_token_ids: frozenset[int]) -> FinishReason:
    return FinishReason.STOP if ended.token_ids[-1] in eos_token_ids else FinishReason.LENGTH


def _text(token_ids: list[int], tokenizer: Any) -> str:
    text = GeneratedText(tokenizer, ())
    for token_id in token_ids:
        text.push(token_id)
    text.finish()
    return text.text
