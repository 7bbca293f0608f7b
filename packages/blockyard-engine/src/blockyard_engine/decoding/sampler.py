"""Samples the next token from a request's logits, independently of the rest of the batch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from blockyard.errors import ModelError

from ..results import TokenLogprob
from ..sampling import SamplingParams


def adjust_logits(
    logits: torch.Tensor, params: SamplingParams, banned: Collection[int], prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """Return logits (vocabulary,) with biases, penalties for earlier tokens, and `banned` tokens excluded.

    In vLLM's order: biases, the repetition penalty, then the two penalties that count only the answer. Computed in
    float32, so no bias overflows. O(vocabulary + tokens).
    """
    logits = _biased(logits.float(), params.biases)
    logits = penalize(logits, params.repetition_penalty, [*prompt, *answer])
    logits = _discouraged(logits, params.presence_penalty, params.frequency_penalty, answer)
    return _without(logits, banned)


def penalize(logits: torch.Tensor, penalty: float, token_ids: list[int]) -> torch.Tensor:
    """Return logits (vocabulary,) with the penalty applied once to each of `token_ids`. O(vocabulary + tokens)."""
    if penalty == 1:
        return logits
    seen = torch.tensor(sorted(set(token_ids)), device=logits.device)
    own = logits[seen]
    # A penalty near 0 overflows, and infinite logits cannot be drawn from.
    return logits.index_copy(0, seen, torch.where(own < 0, own * penalty, own / penalty).nan_to_num())


def _biased(logits: torch.Tensor, biases: tuple[tuple[int, float], ...]) -> torch.Tensor:
    if not biases:
        return logits
    tokens, values = zip(*biases, strict=True)
    return logits.index_add(
        0,
        torch.tensor(tokens, device=logits.device),
        torch.tensor(values, dtype=logits.dtype, device=logits.device),
    )


def _discouraged(logits: torch.Tensor, presence: float, frequency: float, answer: list[int]) -> torch.Tensor:
    if not answer or (presence == 0 and frequency == 0):
        return logits
    tokens, counts = torch.tensor(answer, device=logits.device).unique(return_counts=True)
    return logits.index_copy(0, tokens, logits[tokens] - frequency * counts - presence)


def _without(logits: torch.Tensor, banned: Collection[int]) -> torch.Tensor:
    known = [token for token in banned if token < len(logits)]
    if not known or len(known) == len(logits):  # if all are banned, ignore the ban
        return logits
    return logits.index_fill(0, torch.tensor(known, device=logits.device), -math.inf)


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """The request and completion for which a token is sampled.

    Attributes:
        params: sampling parameters.
        index: number of the completion.
        num_prompt_tokens: tokens of the prompt.
        stop_token_ids: tokens that end the completion.
    """

    params: SamplingParams
    index: int
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    def banned(self, position: int) -> frozenset[int]:
        """Return the tokens that may not be the answer's token at `position`, counted from 0."""
        return self.stop_token_ids if position < self.params.min_tokens else frozenset()


class StepSampler:
    """Samples from the logits of one step, (rows, vocabulary), with one argmax for all greedy rows.

    Raises `ModelError` if a row is not finite.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        if len(logits) and not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            raise ModelError("the model's logits are not finite; check its weights, or use a dtype with a larger range")
        self._logits = logits
        self._likeliest: list[int] = logits.argmax(dim=-1).tolist()

    def choose(self, row: int, context: SamplingContext, token_ids: list[int]) -> Choice:
        """Return the token that follows `token_ids` (prompt and answer), from the logits in `row`. O(vocabulary).

        A drawn row is processed by itself, so the rest of the batch cannot affect it.
        """
        params, token_id, logits = context.params, self._likeliest[row], self._logits[row]
        position = len(token_ids) - context.num_prompt_tokens
        banned = context.banned(position)
        if params.adjusts_logits or banned:
            prompt, answer = token_ids[: context.num_prompt_tokens], token_ids[context.num_prompt_tokens :]
            logits = adjust_logits(logits, params, banned, prompt, answer)
            token_id = int(logits.argmax())
        if params.temperature > 0:
            token_id = _draw(logits, params, uniform(params.seed, context.index, position))
        return Choice(token_id, self._logprob(row, token_id, params.logprobs))

    def verify(self, row: int, context: SamplingContext, token_ids: list[int], draft: list[int]) -> list[Choice]:
        """Return the tokens that follow while they match `draft`, plus one more.

        Each is the token that would be chosen without the draft: a draw is a function of seed and position, so
        "accepted" can mean "equal" (after Leviathan et al., ICML 2023). The logits are in `row` and the rows after it.
        O(vocabulary * accepted).
        """
        known = list(token_ids)
        choices: list[Choice] = []
        for offset in range(len(draft) + 1):
            choices.append(self.choose(row + offset, context, known))
            known.append(choices[-1].token_id)
            if offset < len(draft) and choices[-1].token_id != draft[offset]:
                break
        return choices

    def _logprob(self, row: int, token_id: int, count: int | None) -> TokenLogprob | None:
        if count is None:
            return None
        logprobs = self._logits[row].float().log_softmax(dim=-1)
        best = logprobs.topk(min(count, len(logprobs)))
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return TokenLogprob(token_id, float(logprobs[token_id]), tuple(top))


def _draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Draw one token by inverting the distribution function at `number`, in [0, 1).

    The sum runs in the order of token ids, not of probabilities: logits differ in their last bits between batches, and
    two nearly equal tokens that change places in a sorted order would change the draw.
    """
    probabilities = draw_weights(logits, params)
    cumulated = probabilities.cumsum(dim=-1)
    token = int(torch.searchsorted(cumulated, number * cumulated[-1], right=True))
    # Rounding may move the threshold past the last token with a probability above 0.
    return min(token, int(probabilities.nonzero()[-1]))


def draw_weights(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities (vocabulary,) of a draw, float64 on the CPU; they need not sum to 1.

    O(vocabulary log vocabulary).
    """
    scaled = logits.to(device="cpu", dtype=torch.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    probabilities = _keep_top_p(_keep_top_k(scaled, params.top_k).softmax(dim=-1), params.top_p)
    return probabilities.masked_fill(probabilities < params.min_p * probabilities.max(), 0)


def _keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    if top_k == 0 or top_k >= len(logits):
        return logits
    smallest_kept = logits.topk(top_k).values[-1]
    return logits.masked_fill(logits < smallest_kept, -math.inf)


def _keep_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    if top_p == 1:
        return probabilities
    descending = probabilities.sort(descending=True).values
    mass_before = descending.cumsum(dim=-1) - descending
    smallest_kept = descending[mass_before < top_p][-1]
    return probabilities.masked_fill(probabilities < smallest_kept, 0)


def uniform(seed: int, index: int, position: int) -> float:
    """Return the random number in [0, 1) of this seed, completion and position.

    It is counter-based (Philox; Salmon et al., SC 2011).
    """
    key = np.array([seed, index], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=position)).random())
