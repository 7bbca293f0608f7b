"""What every engine is asked for: prompts of token ids, and n greedy tokens behind each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of a round: `num_new` greedy tokens for each prompt, past any end-of-sequence token."""

    prompts: list[list[int]]
    num_new: int

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests together."""
        return len(self.prompts) * self.num_new

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence at its end."""
        return max(map(len, self.prompts)) + self.num_new


@dataclass(frozen=True, slots=True)
class Size:
    """How much work a round is."""

    num_requests: int
    num_prompt_tokens: int
    num_new: int


def work_of(size: Size, vocab_size: int, number: int) -> Work:
    """The work of round `number`: no two rounds share a prompt, so that no prefix cache helps. O(tokens)."""
    rng = np.random.default_rng(1000 + number)
    prompts = rng.integers(0, vocab_size, (size.num_requests, size.num_prompt_tokens)).tolist()
    return Work(prompts, size.num_new)
