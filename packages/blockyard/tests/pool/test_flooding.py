"""Prompts made to have one hash: possible for a known seed, useless against one that is drawn."""

from __future__ import annotations

import random

import pytest

from blockyard import BlockPool, CacheConfig, InvalidArgument, KVCacheManager
from blockyard.core.index.hashing import hash_keys
from blockyard_testing.seeds import run_seed

from ..support.short_vectors import NUM_PAIRS, changes_without_trace, flood

KNOWN_SEED = 7
NUM_PROMPTS = 60


def make_pool(hash_seed: int | None = None) -> BlockPool:
    return BlockPool(100, 16, hash_seed=hash_seed)


def hashes_of(pool: BlockPool, prompts: list[list[int]]) -> list[int | None]:
    """The hash under which each of these blocks is cached."""
    found = []
    for tokens in prompts:
        lease = pool.get_new_blocks(1)
        pool.cache_full_blocks(lease, tokens)
        found.append(pool.block(lease[0]).block_hash)
    pool.check()
    return found


def manager_seed(cache: KVCacheManager) -> list[int]:
    return list(cache._parts.token_blocks.index._keys)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Different blocks, all with one hash under the known seed."""
    draw = random.Random(run_seed())
    keys = list(hash_keys(KNOWN_SEED, NUM_PAIRS))
    block = [draw.randrange(2**30, 2**30 + 2**20) for _ in range(16)]
    block[1] += 1 - (keys[1] + block[1]) % 2  # one odd weight at least, for the lattice
    return flood(block, keys, NUM_PROMPTS, draw)


def test_the_vectors_are_short() -> None:
    """So short that every prompt leaves room for their sums, and for the sums of these."""
    keys = list(hash_keys(KNOWN_SEED, NUM_PAIRS))
    vectors = changes_without_trace([1] * 16, keys)
    assert len(vectors) == NUM_PAIRS
    assert max(abs(item) for vector in vectors for item in vector) < 2**11
    for vector in vectors:
        assert sum(item * (keys[2 * pair + 1] + 1) for pair, item in enumerate(vector)) % 2**62 == 0


def test_under_a_known_seed_they_have_one_hash_and_hit_nothing_wrong(prompts: list[list[int]]) -> None:
    """The docs say so: a seed that is given protects nobody. No hit is wrong, whatever the hashes are."""
    pool = make_pool(KNOWN_SEED)
    assert len(set(hashes_of(pool, prompts))) == 1
    assert [list(pool.get_cached_blocks(tokens)) for tokens in prompts] == [[n] for n in range(1, NUM_PROMPTS + 1)]


def test_under_a_drawn_seed_the_same_prompts_do_not_collide(prompts: list[list[int]]) -> None:
    """By chance two of them would, once in a million runs or so."""
    assert len(set(hashes_of(make_pool(), prompts))) == NUM_PROMPTS
    cache = KVCacheManager(CacheConfig(100, 16))
    found = []
    for tokens in prompts:
        cache.commit(seq := cache.allocate(tokens), cache.reserve(seq).num_scheduled)
        found.append(cache.block(int(cache.block_ids(seq)[0])).block_hash)
    assert len(set(found)) == NUM_PROMPTS


def test_managers_and_pools_draw_seeds_of_their_own() -> None:
    drawn = [manager_seed(KVCacheManager(CacheConfig(10, 16))) for _ in range(20)]
    assert len({tuple(keys) for keys in drawn}) == 20
    block = [list(range(16))]
    assert len({hashes_of(make_pool(), block)[0] for _ in range(20)}) == 20


@pytest.mark.parametrize("seed", [0, 1, 2**62 - 1])
def test_a_given_seed_is_taken(seed: int) -> None:
    first, second = (KVCacheManager(CacheConfig(10, 16, hash_seed=seed)) for _ in range(2))
    assert manager_seed(first) == manager_seed(second) == list(hash_keys(seed, NUM_PAIRS))


def test_a_drawn_seed_is_not_shown_by_the_config() -> None:
    """A config that goes into a log takes no secret along."""
    cache = KVCacheManager(CacheConfig(10, 16))
    assert cache.config.hash_seed is None


@pytest.mark.parametrize("seed", [-1, 2**62, 1.5, True, "0"])
def test_a_seed_outside_its_limits_is_refused(seed: object) -> None:
    with pytest.raises(InvalidArgument, match="hash_seed"):
        CacheConfig(10, 16, hash_seed=seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="hash_seed"):
        make_pool(seed)  # type: ignore[arg-type]
