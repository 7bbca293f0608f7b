"""A step that is short of blocks: what is not served evicts nothing, whatever policy chooses the victims."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard import LayerGroup, SeqStatus

from ..support.checked import Checked, prompt

POLICIES = ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density"]


def short(policy: str, **options: Any) -> tuple[Checked, list[int], int]:
    """A cache with three idle cached blocks and no others free, and a sequence that runs."""
    cache = Checked(num_blocks=8, eviction_policy=policy, **options)
    idle = prompt(1, 13)
    running = cache.prefilled(prompt(2, 13), [7])
    cache.free(cache.prefilled(idle[:12]))
    assert (cache.num_free_blocks, cache.num_cached_tokens(idle)) == (3, 12)
    return cache, idle, running


@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_that_gets_nothing_evicts_nothing(policy: str) -> None:
    cache, idle, running = short(policy)
    plan = cache.reserve([running], 20)
    assert plan.status.tolist() == [SeqStatus.NO_BLOCKS]
    assert (cache.num_cached_tokens(idle), cache.stats().num_evicted_blocks) == (12, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_retained_stays_too(policy: str) -> None:
    cache, idle, running = short(policy, retention_blocks=3)
    assert cache.retain(idle) == 3
    assert cache.reserve([running], 20).status.tolist() == [SeqStatus.NO_BLOCKS]
    assert cache.num_cached_tokens(idle) == 12


@pytest.mark.parametrize("policy", POLICIES)
def test_those_that_are_served_evict_what_they_take(policy: str) -> None:
    cache, _, running = short(policy)
    second = cache.fork(running)[0]
    plan = cache.reserve([running, second], [20, 4])
    assert plan.status.tolist() == [SeqStatus.NO_BLOCKS, SeqStatus.SCHEDULED]
    assert cache.stats().num_evicted_blocks == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("groups", [(), (LayerGroup(4), LayerGroup(4, sliding_window=6))])
def test_at_random_nothing_is_evicted_where_nothing_is_taken(policy: str, groups: tuple[LayerGroup, ...]) -> None:
    rng = np.random.default_rng(11)
    cache = Checked(num_blocks=24, eviction_policy=policy, groups=groups, max_num_seqs=4)
    seqs: list[int] = []
    num_short = 0
    for _ in range(400):
        action = rng.integers(4)
        if action == 0 and len(seqs) < 4:
            handle = cache.try_allocate(prompt(int(rng.integers(5)), int(rng.integers(1, 20))))
            if handle:
                seqs.append(handle)
        elif action == 1 and seqs:
            cache.free(seqs.pop(int(rng.integers(len(seqs)))))
        elif seqs:
            before = cache.stats()
            counts = [int(rng.integers(1, min(25, 65 - cache.num_computed_tokens(seq)))) for seq in seqs]
            plan = cache.reserve(seqs, counts)
            after = cache.stats()
            taken = after.num_allocated_blocks - before.num_allocated_blocks
            assert after.num_evicted_blocks - before.num_evicted_blocks <= taken
            num_short += int((plan.status == SeqStatus.NO_BLOCKS).any())
            left = cache.num_tokens(seqs) - cache.num_computed_tokens(seqs)
            new = [[5] * max(int(n - have), 0) + [-1] * 30 for n, have in zip(plan.num_scheduled, left, strict=True)]
            cache.commit(seqs, plan.num_scheduled, [row[:30] for row in new])
            for seq in [seq for seq in seqs if cache.num_tokens(seq) > 38]:
                seqs.remove(seq)
                cache.free(seq)
    assert num_short > 5
