"""How far the tokens of an answer are from those that the sampler takes from exact logits: rounding, or a mistake?

Logits differ in their last bits from batch to batch. Where the number of a draw lies that near to the edge between two
tokens, or two logits are that near in greedy decoding, either token is right, and what follows is another answer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from blockyard_engine import SamplingParams
from blockyard_engine.decoding import sampler

#: Up to here a distance is rounding: logits of the tiny models in float32 are within 1e-4 of exact ones.
ROUNDING = 1e-4


def exact(model: Any) -> Any:
    """A copy of a model that computes in float64."""
    return copy.deepcopy(model).double()


def distances(
    exact_model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    sampling: SamplingParams,
    index: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """For each token of an answer, how far it is from the choice behind those before it; 0 where it is the choice.

    Of a draw: from its number to the token's part of the distribution, as a probability; infinite where the token has
    none. Greedy: from its logit to the highest one. index: of the completion. One pass of the model.
    """
    if len(answer) == 0:
        return []
    with torch.inference_mode():
        logits = exact_model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    asked = sampler.SamplingContext(sampling, index, len(prompt), stop_token_ids)
    found = []
    for place, token in enumerate(answer):
        row = sampler.adjust_logits(
            logits[place], sampling, asked.banned(place), list(prompt), list(answer[:place])
        ).double()
        number = sampler.uniform(sampling.seed, index, place)
        rows = [row, *_swapped_at_top_k(row, sampling)]
        found.append(min(_distance(each, token, way, number) for each in rows for way in _ways(sampling)))
    return found


def same_tokens(
    model: Any, prompt: Sequence[int], params: SamplingParams, index: int, left: Sequence[int], right: Sequence[int]
) -> bool:
    """Whether completion `index` is `left` as well as `right`: equal, or both whole and each token a choice."""
    if list(left) == list(right):
        return True
    stops = frozenset(params.stop_token_ids)  # in the model's own dtype: experts of transformers have no float64
    return all(
        (len(tokens) == params.max_tokens or (len(tokens) > 0 and tokens[-1] in stops))
        and max(distances(model, prompt, tokens, params, index, stops)) <= ROUNDING
        for tokens in (left, right)
    )


def same_answer(
    model: Any,
    prompt: Sequence[int],
    params: SamplingParams,
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
) -> bool:
    """`same_tokens` of every completion of a request."""
    return len(left) == len(right) and all(
        same_tokens(model, prompt, params, index, *pair) for index, pair in enumerate(zip(left, right, strict=True))
    )


def _swapped_at_top_k(logits: torch.Tensor, sampling: SamplingParams) -> list[torch.Tensor]:
    """The logits with the last token that top-k keeps exchanged for the first left out, where they are near."""
    if sampling.temperature == 0 or not 0 < sampling.top_k < len(logits):
        return []
    (kept, out), (last, first) = (each[-2:].tolist() for each in logits.topk(sampling.top_k + 1))
    if kept - out > ROUNDING:
        return []
    swapped = logits.clone()
    swapped[last], swapped[first] = out, kept
    return [swapped]


def _ways(sampling: SamplingParams) -> list[SamplingParams]:
    """The same, and top-p and min-p a little lower and higher: rounding decides about tokens at their edge too."""
    factors = [1.0]
    if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.min_p > 0):
        factors += [1 - ROUNDING, 1 + ROUNDING]
    return [
        replace(sampling, top_p=min(sampling.top_p * factor, 1.0), min_p=min(sampling.min_p * factor, 1.0))
        for factor in factors
    ]


def _distance(logits: torch.Tensor, token: int, sampling: SamplingParams, number: float) -> float:
    if sampling.temperature == 0:
        return float(logits.max() - logits[token])
    probabilities = sampler.draw_weights(logits, sampling)
    if probabilities[token] == 0:
        return math.inf
    cumulated = probabilities.cumsum(dim=-1)
    end, total = float(cumulated[token]), float(cumulated[-1])
    begin = end - float(probabilities[token])
    return max(begin / total - number, number - end / total, 0.0)
