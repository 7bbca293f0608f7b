"""Speculation: drafts of the next tokens from the text itself, which the model verifies in one step."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.arguments import require_int
from blockyard.errors import InvalidArgument

MAX_DRAFT = 64
MAX_NGRAM = 16


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Prompt-lookup decoding (Saxena, 2023): drafts the tokens that followed an earlier occurrence of the latest ones.

    Raises `InvalidArgument` for values outside their limits.

    Args:
        num_tokens: maximum tokens of a draft, 1 to 64.
        max_ngram: longest run of latest tokens to look up, 1 to 16; shorter ones are tried next.
    """

    num_tokens: int = 4
    max_ngram: int = 3

    def __post_init__(self) -> None:
        require_int("num_tokens", self.num_tokens, 1, MAX_DRAFT)
        require_int("max_ngram", self.max_ngram, 1, MAX_NGRAM)


def require_speculation(speculation: object) -> PromptLookup | None:
    """Return `speculation` if it is a `PromptLookup` or None. Raises `InvalidArgument`."""
    if speculation is not None and not isinstance(speculation, PromptLookup):
        raise InvalidArgument(f"speculation is {speculation!r}; it must be a PromptLookup or None")
    return speculation


class Drafter:
    """Drafts for one sequence. An index of its n-grams makes a draft O(max_ngram), independent of the length."""

    def __init__(self, config: PromptLookup) -> None:
        self._config = config
        #: n-gram to the index of the token after its latest occurrence.
        self._next: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that may follow `token_ids`, which may only grow between calls."""
        for index in range(max(self._num_indexed, 1), len(token_ids)):
            for length in range(1, min(self._config.max_ngram, index) + 1):
                self._next[tuple(token_ids[index - length : index])] = index
        self._num_indexed = len(token_ids)
        longest = min(self._config.max_ngram, len(token_ids) - 1)
        for length in range(longest, 0, -1):
            follows = self._next.get(tuple(token_ids[-length:]))
            if follows is not None:
                return token_ids[follows : follows + min(limit, self._config.num_tokens)]
        return []
