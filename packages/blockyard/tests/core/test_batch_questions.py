"""Queries and reservations of a whole batch give the same results as those of single sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockyard import ConcurrentCall, InvalidArgument, KVCacheManager, LayerGroup, UnknownSequence
from blockyard.config import cache_config
from blockyard_testing.hostile_values import Array


def made(**options: Any) -> KVCacheManager:
    return KVCacheManager(cache_config(num_blocks=40, block_size=4, max_num_seqs=8, max_model_len=64, **options))


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda seqs: np.array(seqs, dtype=np.uint64)])
def test_batch_query_equals_single_queries(form: Any) -> None:
    cache = made()
    seqs = [cache.allocate(list(range(start, start + length))) for start, length in ((0, 5), (100, 9), (200, 1))]
    cache.commit(seqs[1], cache.reserve(seqs[1], 7).num_scheduled)
    assert cache.num_tokens(form(seqs)).tolist() == [cache.num_tokens(seq) for seq in seqs] == [5, 9, 1]
    assert cache.num_computed_tokens(form(seqs)).tolist() == [0, 7, 0]
    assert cache.num_tokens(form(seqs)).dtype == np.int64
    assert cache.num_tokens([]).tolist() == []


def test_single_query_returns_an_int() -> None:
    cache = made()
    seq = cache.allocate([1, 2, 3])
    for handle in (seq, np.int64(seq), np.array(seq)):
        assert type(cache.num_tokens(handle)) is int
        assert type(cache.num_computed_tokens(handle)) is int
    assert cache.num_tokens([seq]).shape == (1,)


@pytest.mark.parametrize("seqs", ["x", b"x", None, 1.5, True, [True], [1.5], [[1]], {"a": 1}])
def test_queries_refuse_values_that_are_no_handles(seqs: Any) -> None:
    cache = made()
    cache.allocate([1, 2, 3])
    for ask in (cache.num_tokens, cache.num_computed_tokens):
        with pytest.raises(InvalidArgument, match="seq"):
            ask(seqs)


def test_a_stale_handle_and_one_given_twice_are_refused() -> None:
    cache = made()
    old, seq = cache.allocate([1, 2, 3]), cache.allocate([4, 5])
    cache.free(old)
    with pytest.raises(UnknownSequence, match="was freed already"):
        cache.num_tokens([seq, old])
    with pytest.raises(InvalidArgument, match="twice"):
        cache.num_computed_tokens([seq, seq])


def test_a_reservation_without_counts_is_for_all_that_is_known_and_not_computed() -> None:
    cache = made()
    long, short = cache.allocate(list(range(10))), cache.allocate([50, 51, 52])
    cache.commit(long, cache.reserve(long, 4).num_scheduled)
    plan = cache.reserve([long, short])
    assert plan.num_scheduled.tolist() == [6, 3]
    assert plan.num_computed.tolist() == [4, 0]
    cache.commit([long, short], plan.num_scheduled, [7, -1])
    assert cache.reserve([long, short]).num_scheduled.tolist() == [1, 0]
    cache.commit([long, short], [1, 0])
    assert cache.reserve([]).num_scheduled.tolist() == []
    cache.check()


def test_reservation_without_counts_equals_one_with_them() -> None:
    caches = [made(groups=(LayerGroup(4), LayerGroup(4, sliding_window=6)), hash_seed=1) for _ in range(2)]
    plans = []
    for cache, counts in zip(caches, (None, [11, 6]), strict=True):
        seqs = [cache.allocate(list(range(11))), cache.allocate(list(range(90, 96)))]
        plans.append(cache.reserve(seqs) if counts is None else cache.reserve(seqs, counts))
        cache.check()
    for first, second in zip(plans[0].groups, plans[1].groups, strict=True):
        assert first.slot_mapping.tolist() == second.slot_mapping.tolist()


@pytest.mark.parametrize("options", [{}, {"groups": (LayerGroup(4), LayerGroup(4, sliding_window=6))}])
def test_num_cached_tokens_holds_nothing(options: Any) -> None:
    cache = made(**options)
    prompt = list(range(12))
    assert cache.num_cached_tokens(prompt) == 0
    seq = cache.allocate(prompt)
    cache.commit(seq, cache.reserve(seq).num_scheduled)
    cache.free(seq)
    free, stats = cache.num_free_blocks, cache.stats()
    assert cache.num_cached_tokens(prompt) == 8  # the last token is left to compute
    assert cache.num_cached_tokens([*prompt, 99]) == 12
    assert cache.num_cached_tokens([*prompt[:7], 99, 98]) == 4
    assert (cache.num_free_blocks, cache.stats()) == (free, stats)
    again = cache.allocate([*prompt, 99])
    assert cache.num_computed_tokens(again) == 12


def test_in_the_middle_of_a_call_one_may_be_asked_about_and_a_batch_may_not() -> None:
    cache = made()
    seq = cache.allocate([1, 2, 3])
    told: list[int] = []

    def ask() -> None:
        told.append(cache.num_tokens(seq))
        with pytest.raises(ConcurrentCall):
            cache.num_tokens([seq])

    assert cache.can_append(seq, Array(ask, [1]))
    assert told == [3]
