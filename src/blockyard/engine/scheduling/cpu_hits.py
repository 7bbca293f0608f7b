"""Prompt tokens that were found in the CPU pool: the manager counts its hits, and the plans say which were loaded."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...core.manager import KVCacheManager
from ...core.plan import StepPlan
from ..request import Branch


class CpuHits:
    """Counts them, of requests that compute something for the first time. num_tokens: since it was made."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.num_tokens = 0
        self._cache = cache

    def note(self, plan: StepPlan, branches: Iterable[Branch]) -> None:
        """What a plan loads for branches. O(1) for one that loads nothing, else O(blocks of new branches).

        With several layer groups a token counts once: by the group that loads most.
        """
        targets, groups = plan.swap_ins[:, 1], plan.swap_in_groups
        if len(targets):
            for branch in branches:
                if branch.request.num_cached_tokens is None:
                    num_tokens = max(
                        self._num_loaded(branch, number, targets[groups == number])
                        for number in range(len(self._cache.config.layer_groups))
                    )
                    branch.request.num_cpu_cached_tokens += num_tokens
                    self.num_tokens += num_tokens

    def _num_loaded(self, branch: Branch, group: int, targets: np.ndarray) -> int:
        num_blocks = np.count_nonzero(np.isin(self._cache.block_ids(branch.seq, group), targets))
        return int(num_blocks) * self._cache.config.layer_groups[group].block_size
