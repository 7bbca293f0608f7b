"""The compiled build and the sources: the same seeds, the same results (whole caches: `core/test_world.py`)."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

import blockyard
from blockyard_testing import source_only
from blockyard_testing.seeds import run_seed

from ..support.pool_sides import PoolSide, PoolWalk

pytestmark = pytest.mark.skipif(
    not blockyard.compiled(), reason="the twin test compares two builds, and this one is interpreted itself"
)


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    return source_only.load_interpreted()


def test_both_builds_are_what_they_say(interpreted: ModuleType) -> None:
    assert not interpreted.compiled()
    assert interpreted.KVCacheManager is not blockyard.KVCacheManager
    module = interpreted.__name__ + ".core.manager"
    assert interpreted.KVCacheManager.__module__ == module
    assert __import__(module, fromlist=["*"]).__file__.endswith("manager.py")


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "s3fifo", "arc", "score", "density"])
def test_pools_alone_see_the_same(interpreted: ModuleType, policy: str) -> None:
    """The calls of a scheduler of one's own: the same answers, the same sentences in errors, the same state."""
    seed = run_seed()
    settings = {"hash_seed": seed, "eviction_policy": policy, "enable_kv_cache_events": True}
    sides = [PoolSide(package, 3 + seed % 20, 1 + seed % 5, **settings) for package in (blockyard, interpreted)]
    walk = PoolWalk(seed, 3 + seed % 20, 1 + seed % 5, sides)
    for _ in range(200):
        walk.step()
    assert sides[0].told == sides[1].told


def test_the_hash_is_the_same(interpreted: ModuleType) -> None:
    """Chains of random blocks, with keys of every size: wrap-around and unbounded integers agree."""
    numbers = np.random.default_rng(run_seed())
    for block_size in (1, 2, 5, 16, 64):
        seed = int(numbers.integers(2**62))
        tokens = numbers.integers(0, 2**31, 40 * block_size + 1)
        hashes = []
        for package in (blockyard, interpreted):
            cache = package.KVCacheManager(package.CacheConfig(64, block_size, hash_seed=seed))
            cache.allocate(tokens)
            hashes.append([cache.block(block).block_hash for block in range(1, 41)])
        assert hashes[0] == hashes[1]
        assert len(set(hashes[0])) == 40
