"""A pool's size in bytes: its blocks, the padding of groups of unequal bytes, and refused sizes."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import pytest

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, LayerGroup, StateConfig, StateSpec
from blockyard.answers import Resize
from blockyard.config import cache_config
from blockyard.tenants import Tenant

from ..support.snapshot import refused

WIDE = LayerGroup(16, name="full", token_bytes=100)
NARROW = LayerGroup(16, sliding_window=32, name="window", token_bytes=60)
STATE = StateSpec(state_bytes=4_000, checkpoint_every=16)


def test_a_budget_is_whole_blocks_of_the_widest_group() -> None:
    config = CacheConfig(num_bytes=100 * 1_600 + 1_599, groups=(WIDE, NARROW))
    assert (config.block_bytes, config.num_blocks) == (1_600, 100)
    assert config == CacheConfig(100, groups=(WIDE, NARROW))
    assert replace(config, num_blocks=7).num_blocks == 7, "a copy is of blocks"
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_block_of_a_rank_has_its_part_of_the_tokens() -> None:
    config = CacheConfig(num_bytes=10**6, groups=(LayerGroup(64, shards=4, token_bytes=100),))
    assert config.block_bytes == 16 * 100


def test_padding_of_groups_is_reported() -> None:
    config = CacheConfig(num_bytes=10**6, groups=(WIDE, NARROW, STATE), max_num_seqs=4)
    assert config.padding_bytes == (0, 1_600 - 960, 3 * 1_600 - 4_000)
    assert CacheConfig(100, groups=(WIDE, replace(NARROW, token_bytes=100))).padding_bytes == (0, 0)
    assert CacheConfig(100, groups=(LayerGroup(), NARROW)).padding_bytes == (0, 0), "nobody said"


def test_stats_count_what_running_sequences_cannot_fill() -> None:
    cache = KVCacheManager(CacheConfig(num_bytes=100 * 1_600, groups=(WIDE, NARROW), max_num_seqs=4))
    stats = cache.stats()
    assert (stats.num_bytes, stats.block_bytes, stats.num_padding_bytes) == (160_000, 1_600, 0)
    seq = cache.allocate(list(range(100)))
    cache.reserve([seq])
    assert cache.stats().num_padding_bytes == 7 * 640, "seven blocks of the narrow group"
    cache.commit([seq], 100, [1])
    assert cache.stats().num_padding_bytes == 3 * 640, "those behind the window are gone"
    cache.free(seq)
    assert cache.stats().num_padding_bytes == 0
    assert KVCacheManager(CacheConfig(100)).stats().num_bytes == 0


def test_a_pool_is_resized_in_bytes() -> None:
    cache = KVCacheManager(CacheConfig(num_bytes=100 * 1_600, groups=(WIDE, NARROW), max_num_seqs=4))
    assert cache.resize(num_bytes=50 * 1_600 + 3) is Resize.APPLIED
    assert cache.pool.num_blocks == 50
    assert cache.stats().num_bytes == 80_000
    assert cache.resize(num_bytes=200 * 1_600) is Resize.APPLIED
    assert cache.pool.num_blocks == 200
    cache.check()


def test_states_stand_beside_groups_of_unequal_bytes() -> None:
    """A state is cut by the bytes of a block of the pool, whatever groups leave of theirs."""
    config = CacheConfig(
        num_bytes=60 * 1_600,
        groups=(WIDE, NARROW, STATE),
        max_num_seqs=4,
        max_model_len=512,
        states=StateConfig(checkpoints=("every:32",)),
    )
    assert config.state_blocks == 3
    cache = KVCacheManager(config)
    choose = random.Random(5)
    hits = 0
    for _ in range(60):
        prompt = [choose.randrange(2)] * 64 + list(range(choose.randrange(60)))
        seq = cache.allocate(prompt)
        hits += int(cache.num_computed_tokens(seq))
        while cache.num_computed_tokens(seq) < len(prompt):
            plan = cache.reserve([seq])
            cache.commit(
                [seq],
                plan.num_scheduled,
                [7 if cache.num_computed_tokens(seq) + plan.num_scheduled[0] == len(prompt) else -1],
            )
            cache.check()
        cache.free(seq)
        cache.check()
    assert hits > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "num_blocks is 0; it must be from 2 to 134217728, or num_bytes must be given"),
        ({"num_blocks": 9, "num_bytes": 10**6}, "num_blocks is 9 and num_bytes is 1000000; give one of the two"),
        ({"num_bytes": 0}, "num_bytes is 0; it must be from 1 to"),
        ({"num_bytes": -5}, "num_bytes is -5; it must be from 1 to"),
        ({"num_bytes": 10**20}, "num_bytes is 100000000000000000000; it must be from 1 to"),
        ({"num_bytes": True}, "num_bytes is True; it must be an integer"),
        ({"num_bytes": "4GiB"}, "num_bytes is '4GiB'; it must be an integer"),
        ({"num_bytes": 10**6, "groups": ()}, "num_bytes is 1000000, and the bytes of a block are unknown"),
        ({"num_bytes": 10**6, "groups": (WIDE, LayerGroup())}, "give every LayerGroup its token_bytes"),
        ({"num_bytes": 10**6, "groups": (STATE,)}, "groups has only a StateSpec"),
        ({"num_bytes": 10**6, "groups": 7}, "groups is 7; it must be a tuple of LayerGroup"),
        (
            {"num_bytes": 4_799},
            "num_bytes is 4799; a block has 1600 bytes, and .* needs 3 blocks.* at least 4800 bytes",
        ),
        ({"num_bytes": 6_399, "groups": (WIDE, STATE)}, "needs 4 blocks.* at least 6400 bytes"),
        (
            {"num_bytes": 16_000, "tenants": (Tenant("a", min_blocks=10),)},
            "guarantees .* of 10 blocks .* num_blocks is 10",
        ),
    ],
)
def test_impossible_budgets_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        cache_config(**{"groups": (WIDE, NARROW), **fields})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "num_blocks is 0; it must be from 2 to"),
        ({"num_blocks": 9, "num_bytes": 10**6}, "give one of the two"),
        ({"num_bytes": 4_799}, "at least 4800 bytes"),
        ({"num_bytes": 10**30}, "it must be from 1 to"),
        ({"num_bytes": 1.5}, "num_bytes is 1.5; it must be an integer"),
        ({"num_bytes": 16_000}, "tenants have guarantees .* of 20 blocks together; num_blocks is 10"),
    ],
)
def test_refused_resize_changes_nothing(sizes: dict[str, Any], message: str) -> None:
    cache = KVCacheManager(CacheConfig(num_bytes=10**6, groups=(WIDE, NARROW), tenants=(Tenant("a", min_blocks=20),)))
    with refused(cache, InvalidArgument, match=message):
        cache.resize(**sizes)
