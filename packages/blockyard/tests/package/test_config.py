"""The sizes and switches of a cache, and their limits."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from blockyard import (
    Admission,
    CacheConfig,
    CacheSalt,
    CPUPoolConfig,
    HintConfig,
    InvalidArgument,
    KVCacheManager,
    LayerGroup,
    ObserveConfig,
    StateConfig,
    StateSpec,
)
from blockyard.config import CACHE_FIELDS, MAX_TABLE_ENTRIES, POLICY_NAMES, UNUSED_OPTIONS, cache_config
from blockyard.policies import POLICIES
from blockyard.tenants import Tenant, TenantGroup

LIMITS = {
    "num_blocks": (2, 2**27),
    "block_size": (1, 4096),
    "max_num_seqs": (1, 2**20),
    "max_model_len": (1, 2**27),
    "hash_seed": (0, 2**62 - 1),
}


def config_with(**values: Any) -> CacheConfig:
    """A config with a small table, so that the limit on its entries is out of the way."""
    return cache_config(**{"num_blocks": 8, "max_num_seqs": 1, "max_model_len": 1, **values})


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
        "groups": (),
        "enable_prefix_caching": True,
        "partial_hits": False,
        "eviction_policy": "lru",
        "watermark": 0.01,
        "hash_seed": None,
        "max_steps_in_flight": 1,
        "tenants": (),
        "states": {"checkpoints": ("branch", "ends", "pow2"), "order": "index", "cut_chunks": True},
        "cpu": {"num_blocks": 0, "keep_evicted": True},
        "hints": {"retention_blocks": 0, "max_sessions": 65_536},
        "observe": {
            "track_misses": False,
            "history_size": 0,
            "residency_sample": 0,
            "enable_kv_cache_events": False,
        },
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
    config = cache_config(**options)
    cache = KVCacheManager(config)
    fits = [n for n in range(1, config.max_model_len + 1) if cache.can_allocate([1] * n) is Admission.OK]
    assert config.max_servable_tokens == len(fits)
    assert fits == list(range(1, len(fits) + 1))


# ---------------------------------------------------------------- options that would do nothing

#: A value for each option that is not its default.
OTHER_VALUES = {
    "eviction_policy": "arc",
    "retention_blocks": 2,
    "partial_hits": True,
    "track_misses": True,
    "enable_kv_cache_events": True,
    "state_checkpoints": ("last",),
    "state_order": "lru",
    "cut_chunks": False,
}
STATES_OF_8 = (LayerGroup(8, token_bytes=4), StateSpec(state_bytes=64, checkpoint_every=8))
STATES = (LayerGroup(16, token_bytes=4), StateSpec(state_bytes=64, checkpoint_every=16))
#: Why options are not used, and a config in which that is so.
REASONS: dict[str, dict[str, Any]] = {
    "enable_prefix_caching is False": {"enable_prefix_caching": False},
    "groups has no StateSpec": {"groups": (LayerGroup(16),)},
    "groups has a StateSpec": {"groups": STATES},
}
UNUSED = [(reason, name) for reason, names in UNUSED_OPTIONS.items() for name in names]


@pytest.mark.parametrize(("reason", "name"), UNUSED)
def test_an_option_that_does_nothing_beside_another_is_refused(reason: str, name: str) -> None:
    config_with(**REASONS[reason])
    message = (
        rf"^{name} is .*, which does nothing while {reason}; leave it out$|, which does nothing while groups has no"
    )
    with pytest.raises(InvalidArgument, match=message):
        config_with(**REASONS[reason], **{name: OTHER_VALUES[name]})
    config_with(**REASONS[reason], **{name: CACHE_FIELDS[name].default})


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_each_of_these_options_is_taken_where_it_is_used(name: str) -> None:
    groups = {} if name == "partial_hits" else {"groups": STATES}
    assert config_with(**groups, **{name: OTHER_VALUES[name]}).option(name) == OTHER_VALUES[name]


def test_options_by_name_make_the_same_config_as_its_parts() -> None:
    config = CacheConfig(
        *(100, 8),
        groups=STATES_OF_8,
        states=StateConfig(order="lru"),
        cpu=CPUPoolConfig(num_blocks=9, keep_evicted=False),
        hints=HintConfig(max_sessions=3),
        observe=ObserveConfig(history_size=5),
    )
    flat = {"num_cpu_blocks": 9, "keep_evicted": False, "max_sessions": 3, "history_size": 5}
    assert cache_config(100, 8, groups=STATES_OF_8, state_order="lru", **flat) == config
    assert (
        cache_config(100, 8, groups=STATES_OF_8, state_order="lru", cpu=config.cpu, hints=config.hints, **flat)
        == config
    )
    with pytest.raises(InvalidArgument, match="history is 5; CacheConfig has no such field"):
        cache_config(100, history=5)


@pytest.mark.parametrize("part", ["states", "cpu", "hints", "observe"])
@pytest.mark.parametrize("value", [None, {}, 3, CacheConfig])
def test_a_part_of_another_type_is_refused(part: str, value: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=rf"^{part} is .*; it must be of class (State|CPUPool|Hint|Observe)Config$"
    ):
        config_with(**{part: value})


@pytest.mark.parametrize("size", [4, 16, 32])
def test_a_block_size_beside_groups_without_it_is_refused(size: int) -> None:
    """16 is the default, and is refused all the same if it is given."""
    for groups in ((LayerGroup(8),), (LayerGroup(8), LayerGroup(64, 100))):
        with pytest.raises(InvalidArgument, match=rf"^block_size is {size} beside groups, which have blocks of \[8"):
            config_with(groups=groups, block_size=size)
        config = config_with(groups=groups)
        assert config.block_size == config.hash_block_size == 8
        assert config_with(groups=groups, block_size=8) == config
        copy = dataclasses.replace(config, groups=(LayerGroup(4),))
        assert copy.block_size == 4


@pytest.mark.parametrize("tenants", [np.array([]), np.array([1]), [], None, (np.int64(1),)])
def test_tenants_that_are_no_tuple_of_tenants_are_refused(tenants: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^tenants is "):
        config_with(tenants=tenants)


def test_numbers_of_numpy_are_stored_as_plain_integers() -> None:
    tenant = Tenant("a", np.int64(2), np.int32(3), np.int64(5), np.int64(4), np.int64(1))
    group = TenantGroup("g", (Tenant("b"),), np.int64(2), np.int64(1), np.int64(6))
    layers = LayerGroup(
        np.int64(16), np.int64(20), name="w", shards=np.int64(1), interleave=np.int64(1), token_bytes=np.int64(4)
    )
    state = StateSpec(state_bytes=np.int64(64), checkpoint_every=np.int64(16))
    for made in (tenant, group, layers, state):
        numbers = [getattr(made, each.name) for each in dataclasses.fields(made)]
        assert not [number for number in numbers if isinstance(number, np.integer)], made
    cache = KVCacheManager(config_with(num_blocks=40, tenants=(tenant, group), groups=(layers, state)))
    cache.free(cache.allocate([1], extra_keys=(CacheSalt("a"),)))
    cache.check()


def test_an_option_outside_of_its_part_is_refused_with_the_part_to_pass() -> None:
    with pytest.raises(TypeError, match=r"no argument track_misses: pass observe=ObserveConfig\(track_misses=...\)"):
        CacheConfig(100, track_misses=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no argument num_cpu_blocks: pass cpu=CPUPoolConfig\(num_blocks=...\)"):
        CacheConfig(100, num_cpu_blocks=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'trackmisses'"):
        CacheConfig(100, trackmisses=True)  # type: ignore[call-arg]


def test_errors_name_an_option_as_it_was_written() -> None:
    with pytest.raises(InvalidArgument, match=r"^StateConfig.order is 'best'; it must be one of index, lru$"):
        StateConfig(order="best")
    with pytest.raises(InvalidArgument, match=r"^state_order is 'best'; it must be one of index, lru$"):
        cache_config(100, state_order="best")
    with pytest.raises(InvalidArgument, match=r"^states.order is 'lru', which does nothing while groups has no"):
        CacheConfig(100, states=StateConfig(order="lru"))
    with pytest.raises(InvalidArgument, match=r"^CPUPoolConfig.num_blocks is 1; it must be from 2"):
        CPUPoolConfig(num_blocks=1)
