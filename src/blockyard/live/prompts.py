"""The latest prompts, and the tree of their beginnings: how often each was asked, what of it hit, what is cached."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..core.manager import KVCacheManager
from ..keys import ExtraKey

#: Prompts that are remembered, and tokens of each: enough to see where they part, and bounded (1 MiB).
MAX_PROMPTS = 256
MAX_TOKENS = 1024
MAX_BRANCHES = 24


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


@dataclass(slots=True)
class Branch:
    """Blocks that prompts have in common, up to where they part; a branch below another continues it.

    tenant: a number for the keys, 0 for none. start, end: blocks of the prompt. prefix: tokens up to `end`, int32.
    num_requests: prompts that go through it. num_asked, num_hit: tokens of theirs within it, all and from the cache.
    num_cached: blocks of it that a prompt would hit now.
    """

    tenant: int
    start: int
    end: int
    prefix: NDArray[np.int32]
    keys: tuple[ExtraKey, ...]
    num_requests: int = 0
    num_asked: int = 0
    num_hit: int = 0
    num_cached: int = 0
    below: list[Branch] = field(default_factory=list)


def prompt_tree(prompts: Iterable[AskedPrompt], block_size: int) -> list[Branch]:
    """The branches of prompts by their full blocks, of each tenant, the most asked first; at most `MAX_BRANCHES`.

    O(blocks of the prompts).
    """
    by_keys: dict[tuple[ExtraKey, ...], list[AskedPrompt]] = {}
    for prompt in prompts:
        by_keys.setdefault(prompt.keys, []).append(prompt)
    tenants = {keys: number for number, keys in enumerate(sorted(by_keys, key=bool))}
    first = 0 if () in by_keys else 1
    trees = [_part(asked, keys, first + tenants[keys], 0, block_size) for keys, asked in by_keys.items()]
    return _pruned(sorted((branch for tree in trees for branch in tree), key=_by_use))


def branches_of(tree: Iterable[Branch]) -> list[Branch]:
    """All branches, each before those below it."""
    found: list[Branch] = []
    for branch in tree:
        found += [branch, *branches_of(branch.below)]
    return found


def look_up(branches: list[Branch], block_size: int, cache: KVCacheManager, around: object) -> list[int]:  # noqa: ARG001
    """How many leading blocks of each branch's prefix would be hit now. Only in the cache's thread. O(tokens)."""
    # A hit never takes the last token, so one more stands behind.
    return [
        cache.num_cached_tokens(np.append(branch.prefix, np.int32(0)), branch.keys) // block_size for branch in branches
    ]


def _part(asked: list[AskedPrompt], keys: tuple[ExtraKey, ...], tenant: int, start: int, size: int) -> list[Branch]:
    """The branches that begin at block `start` of these prompts, which are equal up to there."""
    groups: dict[bytes, list[AskedPrompt]] = {}
    for prompt in asked:
        if len(prompt.tokens) >= (start + 1) * size:
            groups.setdefault(prompt.tokens[start * size : (start + 1) * size].tobytes(), []).append(prompt)
    branches = []
    for same in groups.values():
        end = _common_end(same, start + 1, size)
        branch = Branch(tenant, start, end, same[0].tokens[: end * size], keys, len(same))
        branch.num_asked = len(same) * (end - start) * size
        branch.num_hit = sum(min(max(each.num_hit - start * size, 0), (end - start) * size) for each in same)
        if len(same) > 1:
            branch.below = sorted(_part(same, keys, tenant, end, size), key=_by_use)
        branches.append(branch)
    return branches


def _common_end(same: list[AskedPrompt], known: int, size: int) -> int:
    """The block at which prompts that are equal up to block `known` part, or the first of them ends."""
    shortest = min(len(prompt.tokens) for prompt in same) // size * size
    rows = np.stack([prompt.tokens[:shortest] for prompt in same])
    differs = np.flatnonzero((rows != rows[0]).any(axis=0))
    return max(known, int(differs[0]) // size if len(differs) else shortest // size)


def _by_use(branch: Branch) -> tuple[int, int]:
    return (-branch.num_requests, branch.tenant)


def _pruned(tree: list[Branch]) -> list[Branch]:
    """The most asked branches, each with those above it, in the order they stand in."""
    kept = {id(branch) for branch in sorted(branches_of(tree), key=_by_use)[:MAX_BRANCHES]}

    def cut(branches: list[Branch]) -> list[Branch]:
        left = [branch for branch in branches if id(branch) in kept]
        for branch in left:
            branch.below = cut(branch.below)
        return left

    return cut(tree)
