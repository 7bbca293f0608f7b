"""`hold_cached` pins what prompts hit, in every kind of cache, until its lease is freed."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheConfig, CPUPoolConfig, DoubleFree, InvalidArgument, KVCacheManager, LayerGroup, LoRA

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "policy": {"eviction_policy": "arc"},
    "groups": {"groups": (LayerGroup(4), LayerGroup(8, sliding_window=8))},
    "tier": {"num_cpu_blocks": 6},
    "windows alone": {"groups": (LayerGroup(4, sliding_window=8),)},
}
SYSTEM = prompt(1, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_held_blocks_are_hit_after_any_number_of_prompts(kind: str) -> None:
    cache = Checked(num_blocks=24, **KINDS[kind])
    cache.free(cache.prefilled(SYSTEM))
    lease = cache.hold_cached(SYSTEM, holder="system prompt")
    assert 0 < len(lease) <= cache.num_used_blocks
    for number in range(2, 120):
        cache.free(cache.prefilled(prompt(number, 30)))
    assert cache.num_cached_tokens([*SYSTEM, 7]) == 16
    cache.pool.free_blocks(lease)
    cache.check()
    assert cache.num_used_blocks == 0
    with pytest.raises(DoubleFree):
        cache.pool.free_blocks(lease)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_lease_end_one_by_one(kind: str) -> None:
    cache = Checked(num_blocks=24, **KINDS[kind])
    cache.free(cache.prefilled(SYSTEM))
    lease = cache.hold_cached(SYSTEM)
    again = cache.pool.touch(lease)
    tail = cache.pool.split(lease, 1)
    for each in (again, lease, tail):
        cache.check()
        cache.pool.free_blocks(each)
    cache.check()
    assert cache.num_used_blocks == 0


def test_nothing_cached_is_an_empty_lease_and_keys_count() -> None:
    cache = Checked()
    cache.free(cache.prefilled(SYSTEM))
    assert len(cache.hold_cached(prompt(2, 9))) == len(cache.hold_cached(SYSTEM, extra_keys=(LoRA("other"),))) == 0
    assert len(cache.hold_cached(SYSTEM[:7])) == 1


def test_bad_arguments_change_nothing() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=4))
    before = snapshot(cache)
    for tokens, named in (([], {}), ("text", {}), ([1.5], {}), ([1], {"extra_keys": "keys"}), ([1], {"holder": 3})):
        with pytest.raises(InvalidArgument):
            cache.hold_cached(tokens, **named)
        assert snapshot(cache) == before


def test_repr_shows_the_counts() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=4, cpu=CPUPoolConfig(num_blocks=4)))
    seq = cache.allocate(prompt(1, 6))
    plan = cache.reserve([seq])
    assert repr(plan) == "<StepPlan: 1 of 1 sequences, 6 tokens, 0 copies, 0 swap_outs, 0 swap_ins>"
    cache.commit([seq], 6)
    assert repr(cache) == "<KVCacheManager: 1 sequence, 2 of 8 blocks used, 1 cached, 6 free>"
    assert repr(cache.pool) == "<LeasePool: 2 of 8 blocks used, 1 cached, 6 free>"
    assert repr(cache.swap_out([seq])) == "<SwapPlan: 2 swap_outs, 0 swap_ins>"
    assert "6 tokens" in repr(plan), "also when the plan is stale"
