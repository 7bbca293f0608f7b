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

from blockyard.engine import SamplingParams
from blockyard.engine.decoding import sampler

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
    asked = sampler.Asked(sampling, index, len(prompt), stop_token_ids)
    found = []
    for place, token in enumerate(answer):
        row = sampler.adjusted(
            logits[place], sampling, asked.banned(place), list(prompt), list(answer[:place])
        ).double()
        number = sampler.uniform(sampling.seed, index, place)
        found.append(min(_distance(row, token, way, number) for way in _ways(sampling, row)))
    return found


def same_tokens(
    model: Any, prompt: Sequence[int], params: SamplingParams, index: int, left: Sequence[int], right: Sequence[int]
) -> bool:
    """Whether completion `index` is `left` as well as `right`: equal, or apart from a place on, and each a choice."""
    if list(left) == list(right):
        return True
    if all(one == other for one, other in zip(left, right, strict=False)):
        return False  # one is the beginning of the other: no draw can do that
    stops, exact_model = frozenset(params.stop_token_ids), exact(model)
    return all(max(distances(exact_model, prompt, each, params, index, stops)) <= ROUNDING for each in (left, right))


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


def _ways(sampling: SamplingParams, logits: torch.Tensor) -> list[SamplingParams]:
    """The same, and its limits a little lower and higher: rounding decides about tokens at their edge too."""
    if sampling.temperature == 0:
        return [sampling]
    ways = [sampling]
    if 0 < sampling.top_k < len(logits):
        near = logits.sort(descending=True).values
        gaps = (near[:-1] - near[1:]).tolist()
        ways += [
            replace(sampling, top_k=count)
            for count in (sampling.top_k - 1, sampling.top_k + 1)
            if count and gaps[max(count, sampling.top_k) - 2] <= ROUNDING
        ]
    if sampling.top_p < 1 or sampling.min_p > 0:
        ways += [
            replace(way, top_p=min(way.top_p * factor, 1.0), min_p=min(way.min_p * factor, 1.0))
            for way in list(ways)
            for factor in (1 - ROUNDING, 1 + ROUNDING)
        ]
    return ways


def _distance(logits: torch.Tensor, token: int, sampling: SamplingParams, number: float) -> float:
    if sampling.temperature == 0:
        return float(logits.max() - logits[token])
    probabilities = sampler.drawn_from(logits, sampling)
    if probabilities[token] == 0:
        return math.inf
    cumulated = probabilities.cumsum(dim=-1)
    end, total = float(cumulated[token]), float(cumulated[-1])
    begin = end - float(probabilities[token])
    return max(begin / total - number, number - end / total, 0.0)
