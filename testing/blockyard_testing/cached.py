"""What a cache holds of a prompt, asked without holding any of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def cached_tokens(cache: Any, tokens: Sequence[int], keys: tuple[Any, ...] = ()) -> int:
    """How many leading tokens of a prompt stand in cached, computed blocks of a manager's."""
    size = cache.block_size
    ends = range(len(tokens) // size * size, 0, -size)
    return next((end for end in ends if cache.contents.equal_to(tokens[:end], keys)), 0)
