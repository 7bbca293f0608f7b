"""Whether two engines gave the same greedy tokens, and whether, where they parted, rounding may have decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .contestant import Answer
from .work import Work

#: Logits nearer than this are a tie in float32: sums in another order differ by as much.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """Requests with equal tokens, requests that parted at a tie, and those that parted elsewhere."""

    num_equal: int = 0
    num_tied: int = 0
    num_other: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether rounding explains every difference."""
        return self.num_other == 0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(
            self.num_equal + other.num_equal, self.num_tied + other.num_tied, self.num_other + other.num_other
        )

    def __str__(self) -> str:
        parts = [f"{self.num_equal} equal"]
        parts += [f"{self.num_tied} parted at a tie"] * bool(self.num_tied)
        parts += [f"{self.num_other} DIFFERENT"] * bool(self.num_other)
        return ", ".join(parts)


def agreement(model: Any, works: Sequence[Work], ours: Sequence[Answer], theirs: Sequence[Answer]) -> Agreement:
    """Over all rounds. One forward pass of `model`, in its own dtype, for each request that parted."""
    total = Agreement()
    for work, own, other in zip(works, ours, theirs, strict=True):
        for prompt, left, right in zip(work.prompts, own.token_ids, other.token_ids, strict=True):
            total += _one_request(model, prompt, left, right)
    return total


def _one_request(model: Any, prompt: list[int], left: list[int], right: list[int]) -> Agreement:
    if left == right:
        return Agreement(num_equal=1)
    place = next(place for place, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + left[:place]]), use_cache=False).logits[0, -1]
    distance = abs(float(logits[left[place]] - logits[right[place]]))
    return Agreement(num_tied=1) if distance < TIE else Agreement(num_other=1)
