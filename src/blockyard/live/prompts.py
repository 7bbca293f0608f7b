"""The latest prompts that were answered, and what of them hit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..keys import ExtraKey

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
        """A copy of what is remembered, the oldest first. O(256)."""
        with self._lock:
            return list(self._prompts)
