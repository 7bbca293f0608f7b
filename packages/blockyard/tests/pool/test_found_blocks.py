"""Lookups that hold nothing, and holding the found blocks if they are still cached."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from blockyard import (
    BlockPool,
    CacheConfig,
    CacheSalt,
    ForeignBlock,
    FoundBlocks,
    InvalidArgument,
    KVCacheManager,
    OutOfBlocks,
    PolicyError,
    Span,
    StaleBlocks,
)
from blockyard_testing.own_policies import MRU

from ..support.checked import prompt
from ..support.pools import cached, order
from ..support.snapshot import refused, snapshot


def test_a_question_changes_nothing_at_all() -> None:
    pool = BlockPool(12, 4)
    pool.free_blocks(cached(pool, prompt(1, 8)))
    pool.free_blocks(cached(pool, prompt(2, 8)))
    before = snapshot(pool)
    found = pool.find_cached_blocks(prompt(1, 11))
    assert (found.block_ids.tolist(), len(found), found.num_tokens, found.num_idle) == ([1, 2], 2, 8, 2)
    assert snapshot(pool) == before
    assert order(pool) == [5, 6, 7, 8, 9, 10, 11, 2, 1, 4, 3]
    assert pool.leases() == []


def test_a_policy_is_told_when_blocks_are_held_and_not_when_they_are_found() -> None:
    hits: list[int] = []

    class Noting(MRU):
        def hit(self, block: int, key: int) -> None:
            hits.append(block)

    pool = BlockPool(8, 4)
    pool.set_eviction_policy(Noting)
    pool.free_blocks(cached(pool, prompt(1, 8)))
    found = pool.find_cached_blocks(prompt(1, 8))
    assert hits == []
    pool.hold(found, num_blocks=1)
    assert hits == [1]


def test_what_was_found_is_held_and_extended() -> None:
    pool = BlockPool(8, 4)
    pool.free_blocks(cached(pool, prompt(1, 12)))
    found = pool.find_cached_blocks(prompt(1, 16))
    lease = pool.hold(found, holder="request", extend_by=2)
    assert (list(lease), lease.holder, lease.num_cached_blocks, lease.first_block) == ([1, 2, 3, 4, 5], "request", 3, 0)
    assert found.num_idle == 0
    assert order(pool) == [6, 7]
    pool.free_blocks(lease)
    assert order(pool) == [4, 5, 6, 7, 3, 2, 1]


def test_a_part_of_what_was_found_is_held() -> None:
    pool = BlockPool(8, 4)
    pool.free_blocks(cached(pool, prompt(1, 12)))
    found = pool.find_cached_blocks(prompt(1, 12))
    assert list(pool.hold(found, num_blocks=2)) == [1, 2]
    assert list(pool.hold(found.first(1))) == [1]
    assert list(pool.hold(found, num_blocks=0)) == list(pool.hold(found.first(0))) == []
    assert (found.first(2).num_tokens, found.first(3).num_idle) == (8, 1)
    assert pool.ref_counts()[:4].tolist() == [0, 2, 1, 0]


def test_new_blocks_never_evict_those_that_are_held() -> None:
    """Three idle hits and one free block: two new ones do not fit, though four blocks are free."""
    pool = BlockPool(5, 4)
    pool.free_blocks(cached(pool, prompt(1, 12)))
    found = pool.find_cached_blocks(prompt(1, 12))
    before = snapshot(pool)
    with pytest.raises(OutOfBlocks, match="extend_by is 2; besides the 3 idle ones found, only 1 of 4 blocks") as error:
        pool.hold(found, extend_by=2)
    assert (error.value.num_needed, error.value.num_free) == (5, 4)
    assert snapshot(pool) == before
    assert list(pool.hold(found, extend_by=1)) == [1, 2, 3, 4]


def test_blocks_that_others_hold_leave_room_for_more() -> None:
    pool = BlockPool(6, 4)
    cached(pool, prompt(1, 12))
    found = pool.find_cached_blocks(prompt(1, 12))
    assert found.num_idle == 0
    assert list(pool.hold(found, extend_by=2)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("again", [False, True], ids=["evicted", "evicted and cached otherwise"])
def test_what_is_gone_is_not_held(again: bool) -> None:
    pool = BlockPool(4, 4)
    pool.free_blocks(cached(pool, prompt(1, 12)))
    found = pool.find_cached_blocks(prompt(1, 12))
    other = pool.get_new_blocks(1)
    assert list(other) == [3]
    if again:
        pool.cache_full_blocks(other, prompt(2, 4))
    before = snapshot(pool)
    with pytest.raises(StaleBlocks, match=r"^block 3 at position 2 no longer holds what was found in it") as error:
        pool.hold(found, extend_by=0)
    assert error.value.num_still_cached == 2
    assert snapshot(pool) == before
    assert list(pool.hold(found, num_blocks=error.value.num_still_cached)) == [1, 2]


def test_a_block_that_has_its_content_again_is_held() -> None:
    """Its number comes back with it, as long as an equal block has kept it."""
    pool = BlockPool(3, 4)
    older, newer = cached(pool, prompt(1, 4)), cached(pool, prompt(1, 4))
    found = pool.find_cached_blocks(prompt(1, 4))
    assert found.block_ids.tolist() == [1]
    pool.free_blocks(older)
    taken = pool.get_new_blocks(1)
    assert list(taken) == [1]
    with pytest.raises(StaleBlocks):
        pool.hold(found)
    pool.cache_full_blocks(taken, prompt(1, 4))
    assert list(pool.hold(found)) == [1]
    assert list(newer) == [2]


def test_nothing_found_before_a_reset_is_held_after_it() -> None:
    pool = BlockPool(6, 4)
    lease = cached(pool, prompt(1, 8))
    found = pool.find_cached_blocks(prompt(1, 8))
    pool.reset()
    pool.cache_full_blocks(lease, prompt(1, 8))
    with pytest.raises(StaleBlocks, match="position 0"):
        pool.hold(found)
    assert list(pool.hold(pool.find_cached_blocks(prompt(1, 8)))) == [1, 2]


def test_keys_are_compared() -> None:
    pool = BlockPool(6, 4)
    lease = pool.get_new_blocks(2)
    pool.cache_full_blocks(lease, prompt(1, 8), extra_keys=(CacheSalt("a"),))
    assert len(pool.find_cached_blocks(prompt(1, 8))) == 0
    assert len(pool.find_cached_blocks(prompt(1, 8), extra_keys=(CacheSalt("b"),))) == 0
    assert len(pool.find_cached_blocks(prompt(1, 8), extra_keys=(CacheSalt("a"),))) == 2


def test_a_span_may_end_behind_the_tokens() -> None:
    """A chunk of a prompt ends inside an image; the whole image is known and compared all the same."""
    pool = BlockPool(6, 4)
    tokens = prompt(1, 16)
    pool.cache_full_blocks(pool.get_new_blocks(2), tokens[:8], extra_keys=(Span("cat", 6, 10),))
    assert len(pool.find_cached_blocks(tokens[:8], extra_keys=(Span("cat", 6, 10),))) == 2
    assert len(pool.find_cached_blocks(tokens, extra_keys=(Span("cat", 6, 10),))) == 2
    assert len(pool.find_cached_blocks(tokens, extra_keys=(Span("cat", 6, 9),))) == 1, (
        "cut to another length it is another image"
    )
    assert pool.num_cached_tokens(tokens[:8], extra_keys=(Span("cat", 6, 10),)) == 8


def test_caching_off_finds_nothing() -> None:
    pool = BlockPool(6, 4, enable_prefix_caching=False)
    pool.cache_full_blocks(pool.get_new_blocks(2), prompt(1, 8))
    found = pool.find_cached_blocks(prompt(1, 8))
    assert (len(found), found.block_ids.tolist(), found.num_idle) == (0, [], 0)
    assert list(pool.hold(found, extend_by=2)) == [3, 4]


def test_a_manager_holds_computed_blocks_alone() -> None:
    cache = KVCacheManager(CacheConfig(12, 4, max_model_len=32, watermark=0.0))
    seq = cache.allocate(prompt(1, 12))
    empty = cache.hold_cached(prompt(1, 12))
    assert len(empty) == 0
    cache.reserve([seq], 8)
    cache.commit([seq], 8)
    lease = cache.hold_cached(prompt(1, 12), holder="beside it")
    assert list(lease) == [1, 2]
    cache.free(seq)
    cache.check()
    assert cache.num_used_blocks == 2
    cache.pool.free_blocks(lease)
    cache.pool.free_blocks(empty)
    cache.check()


class Broken(MRU):
    def evict(self) -> int:
        raise RuntimeError("no idea")


def test_a_policy_that_fails_leaves_nothing_held() -> None:
    pool = BlockPool(6, 4)
    pool.free_blocks(cached(pool, prompt(1, 20)))
    pool.set_eviction_policy(Broken)
    found = pool.find_cached_blocks(prompt(1, 8))
    before = order(pool), pool.ref_counts().tolist(), pool.leases(), pool.num_allocated_blocks, pool.peak_used_blocks
    with pytest.raises(PolicyError, match="no idea"):
        pool.hold(found, extend_by=1)
    after = order(pool), pool.ref_counts().tolist(), pool.leases(), pool.num_allocated_blocks, pool.peak_used_blocks
    assert before == after
    assert list(pool.hold(found)) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_blocks": 3}, "num_blocks is 3; it must be from 0 to 2"),
        ({"num_blocks": -1}, "num_blocks is -1"),
        ({"num_blocks": 1.0}, "num_blocks is 1.0"),
        ({"extend_by": -1}, "extend_by is -1"),
        ({"extend_by": None}, "extend_by is None"),
        ({"holder": 3}, "holder is 3"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    pool = BlockPool(8, 4)
    pool.free_blocks(cached(pool, prompt(1, 8)))
    found = pool.find_cached_blocks(prompt(1, 8))
    with refused(pool, InvalidArgument, match=f"^{text}"):
        pool.hold(found, **arguments)


@pytest.mark.parametrize("found", [None, [1, 2], np.array([1]), "1"])
def test_only_what_was_found_is_held(found: Any) -> None:
    with pytest.raises(InvalidArgument, match="it must be what find_cached_blocks returns"):
        BlockPool(8, 4).hold(found)


def test_what_another_pool_found_is_foreign() -> None:
    pools = [BlockPool(8, 4, hash_seed=1) for _ in range(2)]
    for pool in pools:
        cached(pool, prompt(1, 8))
    with pytest.raises(ForeignBlock, match=r"<FoundBlocks \[1, 2\]> was found in another pool"):
        pools[0].hold(pools[1].find_cached_blocks(prompt(1, 8)))


def test_it_is_a_value_of_its_pool() -> None:
    found = BlockPool(8, 4).find_cached_blocks([1, 2, 3, 4])
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            act(found)  # type: ignore[operator]
    with pytest.raises(InvalidArgument, match="num_blocks is 1"):
        found.first(1)
    with pytest.raises(ValueError, match="read-only"):
        found.block_ids[:0] = 0
    with pytest.raises(TypeError):

        class Mine(FoundBlocks):
            pass
