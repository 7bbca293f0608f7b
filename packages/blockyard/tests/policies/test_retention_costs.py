"""What retention costs does not grow with what was asked of it before: work and memory are counted, not time."""

from __future__ import annotations

import tracemalloc

import pytest

import blockyard
from blockyard import CacheConfig, HintConfig, KVCacheManager, OverBudget

from ..support.checked import prompt

NUM_BLOCKS = 100
NUM_REFRESHES = 2_000 if blockyard.compiled() else 200


def retaining(budget: int) -> KVCacheManager:
    cache = KVCacheManager(
        CacheConfig(
            NUM_BLOCKS + 1, 4, max_num_seqs=2, max_model_len=4 * NUM_BLOCKS, hints=HintConfig(retention_blocks=budget)
        )
    )
    seq = cache.allocate(prompt(1, 4 * NUM_BLOCKS - 4))
    cache.reserve([seq], 4 * NUM_BLOCKS - 4)
    cache.commit([seq], 4 * NUM_BLOCKS - 4)
    cache.free(seq)
    return cache


def test_refreshing_a_wish_leaves_nothing_stale() -> None:
    """Each refresh used to leave an entry for each block: 209 MB after 20,000, and a pause when time went on."""
    cache = retaining(NUM_BLOCKS)
    tokens = prompt(1, 4 * NUM_BLOCKS - 4)
    expiries = cache._evict.order.stack.layers[0]._expiries
    cache.retain(tokens, priority=1, expires_at=1.0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(NUM_REFRESHES):
            cache.retain(tokens, priority=1 + number % 3, expires_at=2.0 + number)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert expiries.num_items == NUM_BLOCKS - 1
    assert len(expiries._heap) == NUM_BLOCKS + 1
    assert grown < 100_000
    assert cache._evict.order.stack.layers[0].num_retained == NUM_BLOCKS - 1
    cache.advance_time(1.0 + NUM_REFRESHES)
    assert expiries.num_items == cache._evict.order.stack.layers[0].num_retained == 0
    cache.check()


def test_an_expiry_is_the_latest_wishs_and_no_earlier_ones() -> None:
    cache = retaining(NUM_BLOCKS)
    tokens = prompt(1, 8)
    for expires_at in (5.0, 50.0, 3.0, 20.0):
        cache.retain(tokens, priority=1, expires_at=expires_at)
    cache.advance_time(19.9)
    assert cache._evict.order.stack.layers[0].num_retained == 2
    cache.advance_time(20.0)
    assert cache._evict.order.stack.layers[0].num_retained == 0
    cache.check()


def test_wishes_without_an_expiry_are_in_no_heap_of_expiries() -> None:
    cache = retaining(NUM_BLOCKS)
    cache.retain(prompt(1, 8), priority=1, expires_at=5.0)
    cache.retain(prompt(1, 8), priority=1, expires_at=None)
    assert cache._evict.order.stack.layers[0]._expiries.num_items == 0
    cache.advance_time(10.0)
    assert cache._evict.order.stack.layers[0].num_retained == 2
    cache.retain(prompt(1, 8), priority=0)
    assert cache._evict.order.stack.layers[0].num_retained == 0
    cache.check()


def test_a_full_budget_refuses_without_a_change_and_takes_wishes_it_has() -> None:
    """It used to count the retained blocks of the whole pool at each call."""
    cache = retaining(10)
    assert cache.retain(prompt(1, 40), priority=1, expires_at=5.0) == 10
    for number in range(200):
        with pytest.raises(OverBudget, match="10 of 10 are already"):
            cache.retain(prompt(1, 44), priority=1)
        assert cache.retain(prompt(1, 40), priority=1 + number % 2, expires_at=5.0 + number) == 10
    assert cache._evict.order.stack.layers[0].num_retained == 10
    cache.check()
    assert cache.retain(prompt(1, 4), priority=0) == 1
    assert cache._evict.order.stack.layers[0].num_retained == 9
    cache.check()
