"""What a request's fields do to the logits of its next token before one is chosen; the model's own stay as they are."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from ..sampling import SamplingParams


def adjusted(
    logits: torch.Tensor, params: SamplingParams, banned: Collection[int], prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """Logits (vocabulary,) with biases added, penalties for what was said already, and `banned` tokens out of reach.

    In vLLM's order: biases, the repetition penalty, then the two that count the answer alone. Computed in float32, so
    that no bias overflows. O(vocabulary + tokens).
    """
    logits = _biased(logits.float(), params.biases)
    logits = penalized(logits, params.repetition_penalty, [*prompt, *answer])
    logits = _discouraged(logits, params.presence_penalty, params.frequency_penalty, answer)
    return _without(logits, banned)


def penalized(logits: torch.Tensor, penalty: float, token_ids: list[int]) -> torch.Tensor:
    """Logits (vocabulary,) with those of `token_ids` made less likely, each once. O(vocabulary + tokens)."""
    if penalty == 1:
        return logits
    seen = torch.tensor(sorted(set(token_ids)), device=logits.device)
    own = logits[seen]
    # A penalty near 0 overflows, and infinities leave nothing to draw from.
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
    if not known or len(known) == len(logits):  # where all are banned, one of them must do
        return logits
    return logits.index_fill(0, torch.tensor(known, device=logits.device), -math.inf)
