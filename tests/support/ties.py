"""Tokens of one request twice: equal, or apart from a draw on that the rounding of float32 decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blockyard.engine import SamplingParams
from blockyard.engine.decoding.sampler import Asked, StepSampler

#: What one pass over a prompt differs by from another, cut or batched otherwise: in shares of the largest logit.
ROUNDING = 1e-4


def same_tokens(
    model: Any, prompt: Sequence[int], params: SamplingParams, index: int, left: Sequence[int], right: Sequence[int]
) -> bool:
    """Whether completion `index` is `left` as well as `right`: equal, or apart from a place where rounding decides.

    Two near-equal tokens, a draw at the edge between two, or a token at the edge of top-k: which comes out changes
    with the batch and with the machine. What follows the first different token is another text, and not compared.
    """
    if list(left) == list(right):
        return True
    places = [place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
    if not places:  # one is the beginning of the other, with the same tokens: no draw can do that
        return False
    token_ids = [*prompt, *left[: places[0]]]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, -1]
    noise = torch.randn((300, len(logits)), generator=torch.Generator().manual_seed(0)) * ROUNDING * logits.abs().max()
    sampler = StepSampler(logits + noise)
    asked = Asked(params, index, len(prompt), frozenset(params.stop_token_ids))
    chosen = {sampler.choose(row, asked, token_ids).token_id for row in range(len(noise))}
    return {left[places[0]], right[places[0]]} <= chosen


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
