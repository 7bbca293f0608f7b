"""Auto: who leads, and that the same seed always gives the same."""

from __future__ import annotations

import numpy as np
import pytest

from blockyard import InvalidArgument
from blockyard.core.policies.learned.auto import SampledCache
from blockyard.core.policies.simple.lru import LRU
from blockyard.lab.simulation.policy_run import PolicyRun
from blockyard.policies import ARC, LFU, Auto, EvictionPolicy

from ..support.guard_loads import Load, SlowLRU


def hits_of(policy: EvictionPolicy, requests: list[list[int]], capacity: int) -> int:
    run = PolicyRun(policy, capacity, 1 + max(map(max, requests)), max(map(len, requests)))
    ids = np.array([content for request in requests for content in request], np.int64)
    run.run(ids, np.cumsum([0, *map(len, requests)]).astype(np.int64))
    policy.check()
    return run.num_hits


def popular_and_once(count: int) -> list[list[int]]:
    """Ten prompts are asked for in turn, and between any two of them four that come once."""
    return [[number // 5 % 10] if number % 5 == 0 else [10 + number] for number in range(count)]


def zipf(count: int) -> list[list[int]]:
    """Single contents, each as popular as ever: number k in proportion to 1 / (k + 1)."""
    weights = np.cumsum(1 / np.arange(1, 401))
    drawn = np.random.default_rng(5).random(count) * weights[-1]
    return [[int(content)] for content in np.searchsorted(weights, drawn)]


def test_lfu_leads_where_popularity_lasts_and_then_chooses() -> None:
    requests = zipf(12000)
    auto = Auto(32)
    hits = hits_of(auto, requests, 30)
    lfu, arc = hits_of(LFU(32), requests, 30), hits_of(ARC(32), requests, 30)
    assert auto.leader == "lfu"
    assert hits > (2 * lfu + arc) / 3 > arc


def test_it_is_nearly_as_good_as_the_best_where_prompts_come_once() -> None:
    requests = popular_and_once(6000)
    hits = hits_of(Auto(13), requests, 11)
    assert hits > 0.9 * hits_of(LFU(13), requests, 11)
    assert hits > 2 * hits_of(ARC(13), requests, 11)


def test_a_seed_says_everything() -> None:
    load = Load(3, 6000)
    first = [hits_of(Auto(2000, seed), load.requests, 20) for seed in (1, 1)]
    assert first[0] == first[1]
    for bad in (-1, 2**31, "1"):
        with pytest.raises(InvalidArgument, match=r"^seed is "):
            Auto(10, bad)


def test_clear_forgets_who_led() -> None:
    auto = Auto(13)
    hits_of(auto, zipf(6000), 11)
    assert auto.leader != "density"
    auto.clear()
    assert auto.leader == "density"
    auto.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_sampled_cache_that_samples_all_is_the_cache(seed: int) -> None:
    load = Load(seed, 2000)
    capacity = max(load.capacity, load.longest)
    sample, slow = SampledCache(LRU(2 * capacity + 1), capacity), SlowLRU(capacity)
    for request in load.requests:
        before = slow.num_hits
        slow.request(request)
        assert sample.request(request) == slow.num_hits - before


def test_a_sampled_request_longer_than_the_cache_counts_its_beginning() -> None:
    sample = SampledCache(LRU(7), 3)
    assert [sample.request([1, 2, 3, 4, 5]) for _ in range(2)] == [0, 3]
