"""Lets prompts wait for a shared prefix that another sequence is computing, in caches that cannot share it earlier.

A cache with one group of full attention and no CPU pool lets prompts join blocks that are still being computed
(`blockyard.core.sequences.joins`). Other caches index a block once it is computed, so equal prompts admitted together
would each be computed. Here all but the first wait until they can hit the first one's blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from blockyard import KVCacheManager, StepPlan

from ..request import Branch


class PrefixesInProgress:
    """Prefixes that running branches are computing, for one round of admission."""

    def __init__(self, cache: KVCacheManager, running: Iterable[Branch]) -> None:
        config = cache.config
        self._cache = cache
        self._is_needed = config.is_mapped and config.enable_prefix_caching
        # A hit of several groups ends at a common multiple of their blocks; a shorter one is not worth a wait.
        self._block_size = max(group.block_size for group in config.layer_groups)
        self._prompts: list[tuple[Branch, int]] = []
        for branch in running:
            self.note(branch)

    def note(self, branch: Branch) -> None:
        """Add a running branch, unless it only decodes."""
        if self._is_needed:
            num_computed = self._cache.num_computed_tokens(branch.seq)
            if len(branch.token_ids) - num_computed > 1:
                self._prompts.append((branch, num_computed))

    def should_wait(self, branch: Branch) -> bool:
        """Return whether a running branch has still to compute a whole block that a waiting branch could hit.

        O(prompts in progress), plus O(tokens) for those with the same beginning.
        """
        if branch.is_swapped:
            return False
        size = self._block_size
        for other, num_computed in self._prompts:
            if other.request.extra_keys != branch.request.extra_keys:
                continue  # they share no block
            token_ids = other.token_ids
            # The last token of a prompt is always computed: a hit ends before it.
            most = min(len(branch.token_ids) - 1, len(token_ids)) // size
            least = num_computed // size + 1
            if least <= most and branch.token_ids[: least * size] == token_ids[: least * size]:
                return True
        return False


class CpuHits:
    """Counts prompt tokens loaded from the CPU pool, once per request.

    Attributes:
        num_tokens: tokens counted so far.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        self.num_tokens = 0
        self._cache = cache

    def note(self, plan: StepPlan, branches: Iterable[Branch]) -> None:
        """Record the blocks that a plan loads for branches. O(1) without loads, else O(blocks of new branches).

        With several layer groups a token counts once, by the group that loads most.
        """
        targets, groups = plan.swap_ins[:, 1], plan.swap_in_groups
        if len(targets):
            for branch in branches:
                if branch.request.num_cached_tokens is None:
                    num_tokens = max(
                        self._num_loaded(branch, number, targets[groups == number])
                        for number in range(len(self._cache.config.layer_groups))
                    )
                    branch.num_cpu_tokens += num_tokens

    def count(self, branch: Branch) -> int:
        """Add the tokens loaded for a branch since its admission, when it is first computed; return them."""
        self.num_tokens += branch.num_cpu_tokens
        return branch.num_cpu_tokens

    def _num_loaded(self, branch: Branch, group: int, targets: np.ndarray) -> int:
        num_blocks = np.count_nonzero(np.isin(self._cache.block_ids(branch.seq, group), targets))
        return int(num_blocks) * self._cache.config.layer_groups[group].block_size
