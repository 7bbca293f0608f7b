"""The latest prompts that were answered, and which of them hit a block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.keys import ExtraKey

#: Maximum of prompts, and of tokens stored of each: enough to tell them apart, and at most 1 MiB.
MAX_PROMPTS = 256
MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt that was answered.

    Attributes:
        tokens: int32, its first `MAX_TOKENS` tokens.
        num_tokens: number of all of its tokens.
        num_hit: tokens that came from the cache.
        name: name of its request, or "".
    """

    tokens: NDArray[np.int32]
    num_tokens: int
    num_hit: int
    keys: tuple[ExtraKey, ...]
    name: str = ""


class PromptLog:
    """The latest `MAX_PROMPTS` prompts. Prompts may be added from any thread."""

    def __init__(self) -> None:
        self._prompts: deque[AnsweredPrompt] = deque(maxlen=MAX_PROMPTS)
        self._lock = threading.Lock()
        self.num_noted = 0

    def note(self, token_ids: Sequence[int], num_hit: int, keys: tuple[ExtraKey, ...] = (), name: str = "") -> None:
        """Add a prompt whose first `num_hit` tokens came from the cache. O(1,024 tokens)."""
        tokens = np.array(token_ids[:MAX_TOKENS], np.int32)
        with self._lock:
            self._prompts.append(AnsweredPrompt(tokens, len(token_ids), num_hit, keys, name))
            self.num_noted += 1

    def latest(self) -> list[AnsweredPrompt]:
        """Return the prompts, the oldest first. O(256)."""
        with self._lock:
            return list(self._prompts)


#: Maximum of beginnings that are looked up for a block, and of names that are returned.
MAX_BEGINNINGS = 64
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Beginning:
    """Prompts that are equal up to the end of a block, and hit it.

    Attributes:
        tokens: their common tokens, as bytes of int32.
        keys: their extra keys.
        ages: for each of the prompts, the number of prompts answered after it.
        names: names of their requests.
    """

    tokens: bytes
    keys: tuple[ExtraKey, ...]
    ages: list[int]
    names: list[str]


def beginnings_with(prompts: Iterable[AnsweredPrompt], tokens: list[int], block_size: int) -> list[Beginning]:
    """Return the beginnings that end in a block with these tokens, of prompts that took the block from the cache.

    At most the latest `MAX_BEGINNINGS`. O(tokens of the prompts).
    """
    wanted = np.array(tokens, np.int32)
    found: dict[tuple[bytes, tuple[ExtraKey, ...]], Beginning] = {}
    for age, prompt in enumerate(reversed(list(prompts))):
        num_blocks = min(len(prompt.tokens), prompt.num_hit) // block_size
        rows = prompt.tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
        for row in np.flatnonzero((rows == wanted).all(axis=1)).tolist():
            name = (prompt.tokens[: (row + 1) * block_size].tobytes(), prompt.keys)
            if name not in found and len(found) == MAX_BEGINNINGS:
                continue
            beginning = found.setdefault(name, Beginning(*name, [], []))
            beginning.ages.append(age)
            beginning.names.append(prompt.name)
    return list(found.values())


def read_hits(
    block_id: int,
    beginnings: list[Beginning],
    cache: KVCacheManager,
    status: object,  # noqa: ARG001
) -> list[Beginning]:
    """Return the beginnings whose last block is this one, at most one. Only in the cache's thread. O(tokens)."""
    return [
        each
        for each in beginnings
        if block_id in cache.contents.equal_to(np.frombuffer(each.tokens, np.int32), each.keys)
    ]


def hits_answer(hits: list[Beginning], num_prompts: int) -> dict[str, Any]:
    """Return how many of the latest prompts hit a block, how long ago the last did, and names, latest first."""
    ages = [age for each in hits for age in each.ages]
    names = [name for each in hits for name in each.names if name]
    return {"num": len(ages), "of": num_prompts, "ago": min(ages, default=None), "names": names[:_MAX_NAMES]}
