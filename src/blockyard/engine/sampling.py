"""How a request's tokens are chosen, and the choice: the same whatever the batch around it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from ..arguments import require_bool, require_int
from ..errors import InvalidArgument

_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for.

    max_tokens: new tokens at most, 1 or more.
    temperature: 0 takes the likeliest token (greedy); above 0, tokens are drawn after dividing the logits by it.
    top_k: draw among this many likeliest tokens only; 0 for all.
    top_p: draw among the likeliest tokens that together reach this probability (Holtzman et al., 2020); 1 for all.
    seed: the draws of a request depend on its seed and nothing else: not on the batch, the order, or preemptions.
        Two requests with the same prompt and seed give the same tokens.
    ignore_eos: go on behind the model's end-of-sequence tokens, to `max_tokens`.
    stop_token_ids: further tokens that end the request; they count even with `ignore_eos`.

    Raises `InvalidArgument` for a value outside its limits.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        require_int("max_tokens", self.max_tokens, 1, 2**27)
        require_int("top_k", self.top_k, 0, _MAX_TOKEN_ID)
        require_int("seed", self.seed, 0, 2**63 - 1)
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidArgument("top_p is 0; it must be above 0")
        require_bool("ignore_eos", self.ignore_eos)
        stops = self.stop_token_ids
        if not isinstance(stops, (tuple, list)):
            raise InvalidArgument(f"stop_token_ids is {stops!r}; it must be a tuple of token ids")
        tokens = tuple(require_int("stop_token_ids", token, 0, _MAX_TOKEN_ID) for token in stops)
        object.__setattr__(self, "stop_token_ids", tokens)


def _require_number(name: str, value: object, low: float, high: float) -> None:
    limit = "0 or more" if high == math.inf else f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name} is {value!r}; it must be a number, {limit}")
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidArgument(f"{name} is {value}; it must be {limit}")


def choose_tokens(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    """Choose each request's next token from its row of `logits` (requests, vocabulary).

    positions[i] counts the tokens that request i generated before. Greedy rows are one argmax together; a drawn
    row is worked on by itself, so what else is in the batch cannot reach it. O(requests * vocabulary).
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    for row, wanted in enumerate(params):
        if wanted.temperature > 0:
            tokens[row] = _draw(logits[row], wanted, positions[row])
    return tokens


def _draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Draw one token by inverting the distribution function at a random number of this seed and position.

    The sum runs in the order of token ids, not of probabilities: logits differ in their last bits from batch to
    batch, and two near-equal tokens that change places in a sorted order would change what is drawn.
    """
    scaled = logits.to(device="cpu", dtype=torch.float64)
    scaled = (scaled - scaled.max()) / params.temperature
    probabilities = _keep_top_p(_keep_top_k(scaled, params.top_k).softmax(dim=-1), params.top_p)
    cumulated = probabilities.cumsum(dim=-1)
    threshold = _uniform(params.seed, position) * cumulated[-1]
    token = int(torch.searchsorted(cumulated, threshold, right=True))
    # Rounding may place the threshold at the very end, behind the last token that can be drawn.
    return min(token, int(probabilities.nonzero()[-1]))


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


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of this seed and position: counter-based (Philox; Salmon et al., SC 2011), no state."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
