"""The sizes and switches of a cache, and their limits."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from blockyard import Admission, CacheConfig, InvalidArgument, KVCacheManager, LayerGroup
from blockyard.config import MAX_TABLE_ENTRIES, POLICY_NAMES
from blockyard.policies import POLICIES

LIMITS = {
    "num_blocks": (2, 2**27),
    "block_size": (1, 4096),
    "max_num_seqs": (1, 2**20),
    "max_model_len": (1, 2**27),
    "hash_seed": (0, 2**62 - 1),
}


def config_with(**values: Any) -> CacheConfig:
    """A config with a small table, so that the limit on its entries is out of the way."""
    return CacheConfig(**{"num_blocks": 8, "max_num_seqs": 1, "max_model_len": 1, **values})


@pytest.mark.parametrize("name", LIMITS)
def test_both_ends_of_every_limit(name: str) -> None:
    low, high = LIMITS[name]
    for value in (low, high):
        assert getattr(config_with(**{name: value}), name) == value
    for value in (low - 1, high + 1, -1, 2**63, 2**200):
        with pytest.raises(InvalidArgument, match=f"^{name} is {value}; it must be from {low} to {high}$"):
            config_with(**{name: value})


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [None, "8", 8.0, True, [8], float("nan"), b"8", np.array([8])])
def test_what_is_no_integer(name: str, value: Any) -> None:
    if name == "hash_seed" and value is None:
        return  # None draws one
    with pytest.raises(InvalidArgument, match=f"^{name} "):
        config_with(**{name: value})


@pytest.mark.parametrize("value", [-0.01, 1, 1.0, 2, float("nan"), float("inf"), None, "0.1", True, False])
def test_watermarks_that_are_none(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^watermark is .*; it must be a number from 0 to below 1$"):
        config_with(watermark=value)


@pytest.mark.parametrize("value", [0, 1, None, "yes", 1.0])
def test_switches_that_are_none(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^enable_prefix_caching is .*; it must be True or False$"):
        config_with(enable_prefix_caching=value)


def test_a_table_that_is_too_large() -> None:
    with pytest.raises(
        InvalidArgument, match=rf"max_num_seqs.*{2**40} table entries; the limit is {MAX_TABLE_ENTRIES}"
    ):
        CacheConfig(8, block_size=1, max_num_seqs=2**20, max_model_len=2**20)


def test_defaults() -> None:
    config = CacheConfig(1000)
    assert dataclasses.asdict(config) == {
        "num_blocks": 1000,
        "block_size": 16,
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "enable_prefix_caching": True,
        "watermark": 0.01,
        "hash_seed": None,
        "groups": (),
        "tenants": (),
        "num_cpu_blocks": 0,
        "keep_evicted": True,
        "eviction_policy": "lru",
        "retention_blocks": 0,
        "partial_hits": False,
        "track_misses": False,
        "history_size": 0,
        "residency_sample": 0,
        "enable_kv_cache_events": False,
        "max_steps_in_flight": 1,
        "max_sessions": 65536,
        "state_places": ("junction", "ends", "pow2"),
        "state_order": "index",
        "cut_chunks": True,
    }


@pytest.mark.parametrize(
    ("length", "size", "pages"), [(1, 16, 1), (16, 16, 1), (17, 16, 2), (8192, 16, 512), (5, 1, 5)]
)
def test_blocks_of_the_longest_sequence(length: int, size: int, pages: int) -> None:
    config = CacheConfig(8, size, max_model_len=length)
    assert config.max_blocks_per_seq == pages
    assert KVCacheManager(config).block_table.shape == (256, pages)


@pytest.mark.parametrize(("share", "blocks"), [(0, 0), (0.0, 0), (0.009, 0), (0.01, 1), (0.5, 50), (0.999, 99)])
def test_the_watermark_in_blocks(share: float, blocks: int) -> None:
    assert CacheConfig(100, watermark=share).watermark_blocks == blocks


def test_a_config_is_frozen_compared_and_pickled() -> None:
    config = CacheConfig(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_blocks = 9  # type: ignore[misc]
    assert config == CacheConfig(8) != CacheConfig(9)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(CacheConfig(8))


@pytest.mark.parametrize("name", ["lruu", "", "LRU", "lru "])
def test_an_unknown_policy_is_refused_where_it_is_written_down(name: str) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^eviction_policy is .*; it must be one of arc, density, fifo, lfu, lru"
    ):
        CacheConfig(num_blocks=10, eviction_policy=name)


def test_the_policies_that_a_config_knows_are_those_that_ship() -> None:
    assert sorted(POLICIES) == list(POLICY_NAMES)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 10, "block_size": 4, "max_model_len": 64},
        {"num_blocks": 10, "block_size": 4, "max_model_len": 16},
        {"num_blocks": 101, "block_size": 4, "max_model_len": 1000, "watermark": 0.1},
        {"num_blocks": 12, "max_model_len": 300, "groups": (LayerGroup(4), LayerGroup(8, sliding_window=20))},
        {"num_blocks": 9, "max_model_len": 300, "groups": (LayerGroup(4, sliding_window=10),)},
        {"num_blocks": 2, "block_size": 4, "max_model_len": 64, "groups": (LayerGroup(4), LayerGroup(4))},
    ],
)
def test_the_longest_sequence_that_the_pool_holds(options: dict[str, Any]) -> None:
    """Beside the manager's own answers: OK up to there, NEVER beyond."""
    config = CacheConfig(**options)
    cache = KVCacheManager(config)
    fits = [n for n in range(1, config.max_model_len + 1) if cache.can_allocate([1] * n) is Admission.OK]
    assert config.max_servable_tokens == len(fits)
    assert fits == list(range(1, len(fits) + 1))
