"""The latest prompts that were answered, and what of them hit."""

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

#: Prompts that are remembered, and tokens of each: enough to see where they part, and bounded (1 MiB).
MAX_PROMPTS = 256
MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt that was answered. tokens: int32, its first `MAX_TOKENS`. num_hit: tokens taken from the cache.
    keys: it shares blocks only with prompts of the same keys. name: of its request, "" for none."""

    tokens: NDArray[np.int32]
    num_tokens: int
    num_hit: int
    keys: tuple[ExtraKey, ...]
    name: str = ""


class PromptLog:
    """The latest `MAX_PROMPTS` prompts. `note` may be called in any thread."""

    def __init__(self) -> None:
        self._prompts: deque[AskedPrompt] = deque(maxlen=MAX_PROMPTS)
        self._lock = threading.Lock()
        self.num_noted = 0

    def note(self, token_ids: Sequence[int], num_hit: int, keys: tuple[ExtraKey, ...] = (), name: str = "") -> None:
        """Remember a prompt whose first `num_hit` tokens came from the cache. O(1,024 tokens)."""
        kept = np.array(token_ids[:MAX_TOKENS], np.int32)
        with self._lock:
            self._prompts.append(AskedPrompt(kept, len(token_ids), num_hit, keys, name))
            self.num_noted += 1

    def latest(self) -> list[AskedPrompt]:
        """Return a copy of what is remembered, the oldest first. O(256)."""
        with self._lock:
            return list(self._prompts)


#: Beginnings of prompts of which the cache is asked for one block, and names that are told.
MAX_BEGINNINGS = 64
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True)
class Beginning:
    """Prompts that are equal up to a block, and hit it. ago: of each, how many prompts were answered since."""

    tokens: bytes
    keys: tuple[ExtraKey, ...]
    ago: list[int]
    names: list[str]


def beginnings_with(prompts: Iterable[AskedPrompt], tokens: list[int], block_size: int) -> list[Beginning]:
    """The beginnings that end in a block of these tokens, of the prompts (oldest first) that took it from the cache.

    At most `MAX_BEGINNINGS`, the latest. O(tokens of the prompts).
    """
    wanted = np.array(tokens, np.int32)
    found: dict[tuple[bytes, tuple[ExtraKey, ...]], Beginning] = {}
    for ago, prompt in enumerate(reversed(list(prompts))):
        num_blocks = min(len(prompt.tokens), prompt.num_hit) // block_size
        rows = prompt.tokens[: num_blocks * block_size].reshape(num_blocks, block_size)
        for place in np.flatnonzero((rows == wanted).all(axis=1)).tolist():
            name = (prompt.tokens[: (place + 1) * block_size].tobytes(), prompt.keys)
            if name not in found and len(found) == MAX_BEGINNINGS:
                continue
            beginning = found.setdefault(name, Beginning(*name, [], []))
            beginning.ago.append(ago)
            beginning.names.append(prompt.name)
    return list(found.values())


def see_hits(
    block_id: int,
    beginnings: list[Beginning],
    cache: KVCacheManager,
    around: object,  # noqa: ARG001
) -> list[Beginning]:
    """Return those of the beginnings that this block caches now, one at most. Only in the cache's thread. O(tokens)."""
    return [
        each
        for each in beginnings
        if block_id in cache.contents.equal_to(np.frombuffer(each.tokens, np.int32), each.keys)
    ]


def hits_answer(hits: list[Beginning], num_prompts: int) -> dict[str, Any]:
    """For the page: how many of the latest prompts hit it, how long ago the last did, and their names, latest first."""
    ago = [number for each in hits for number in each.ago]
    names = [name for each in hits for name in each.names if name]
    return {"num": len(ago), "of": num_prompts, "ago": min(ago, default=None), "names": names[:_MAX_NAMES]}
