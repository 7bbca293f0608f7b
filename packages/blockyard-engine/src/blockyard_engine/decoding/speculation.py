"""Guesses of the next tokens from the text itself, for the model to confirm several at a time."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.arguments import require_int
from blockyard.errors import InvalidArgument

MAX_DRAFT = 64
MAX_NGRAM = 16


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Prompt-lookup decoding (Saxena, 2023): what followed the latest tokens where they occurred before.

    num_tokens: tokens guessed at most, 1 to 64. max_ngram: the longest run of latest tokens that is looked for, 1 to
    16; shorter ones follow. Raises `InvalidArgument` for values outside their limits.
    """

    num_tokens: int = 4
    max_ngram: int = 3

    def __post_init__(self) -> None:
        require_int("num_tokens", self.num_tokens, 1, MAX_DRAFT)
        require_int("max_ngram", self.max_ngram, 1, MAX_NGRAM)


def require_speculation(speculation: object) -> PromptLookup | None:
    """`speculation` if it is a way to speculate, or None. Raises `InvalidArgument` for anything else."""
    if speculation is not None and not isinstance(speculation, PromptLookup):
        raise InvalidArgument(f"speculation is {speculation!r}; it must be a PromptLookup or None")
    return speculation


class Drafter:
    """Guesses for one sequence. An index of its n-grams makes a guess O(max_ngram), whatever the length."""

    def __init__(self, config: PromptLookup) -> None:
        self._config = config
        #: n-gram: where the token after its latest occurrence stands.
        self._next: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow `token_ids`, which only ever grows from call to call."""
        self._index(token_ids)
        longest = min(self._config.max_ngram, len(token_ids) - 1)
        for length in range(longest, 0, -1):
            place = self._next.get(tuple(token_ids[-length:]))
            if place is not None:
                return token_ids[place : place + min(limit, self._config.num_tokens)]
        return []

    def _index(self, token_ids: list[int]) -> None:
        for place in range(max(self._num_indexed, 1), len(token_ids)):
            for length in range(1, min(self._config.max_ngram, place) + 1):
                self._next[tuple(token_ids[place - length : place])] = place
        self._num_indexed = len(token_ids)
