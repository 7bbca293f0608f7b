"""How long blocks live, lie idle and wait for reuse: against a plain recomputation from the history of events."""

from __future__ import annotations

import random
from bisect import bisect_left
from typing import Any

import pytest

from blockyard import Admission, CacheConfig, InvalidArgument, KVCacheManager, LayerGroup, ObserveConfig
from blockyard.answers import AllocationEvent, Histogram
from blockyard_testing.seeds import run_seed

from ..support.checked import Checked, prompt

BOUNDS = tuple(2.0**power for power in range(-10, 21))


def followed(num_blocks: int = 8, sample: int = 1, **settings: Any) -> Checked:
    return Checked(num_blocks, 4, residency_sample=sample, history_size=100_000, **settings)


def histogram(durations: list[float]) -> Histogram:
    """Each duration in the first bucket whose bound it does not exceed; the last is above all."""
    counts = [0] * (len(BOUNDS) + 1)
    for duration in durations:
        counts[bisect_left(BOUNDS, duration)] += 1
    return Histogram(BOUNDS, tuple(counts), pytest.approx(sum(durations)))


def durations(events: list[AllocationEvent], sample: int) -> tuple[list[float], list[float], list[float]]:
    """Lifetimes, idle times before eviction and gaps between uses, the definitions spelled out."""
    born: dict[int, float] = {}
    used: dict[int, float] = {}
    lifetimes, idle, gaps = [], [], []
    for event in events:
        for block in event.block_ids:
            if block % sample:
                continue
            if event.action == "take":
                born[block] = event.time
            elif event.action == "share":
                gaps.append(event.time - used[block])
            elif event.action == "evict":
                lifetimes.append(event.time - born[block])
                idle.append(event.time - used[block])
            if event.action != "evict":
                used[block] = event.time
    return lifetimes, idle, gaps


def test_residency_of_one_block_matches_a_manual_count() -> None:
    """Taken at 1, freed at 3, hit at 8, freed at 9, evicted at 25."""
    cache = followed(num_blocks=2)
    for now, step in [(1, "take"), (3, "free"), (8, "take"), (9, "free"), (25, "evict")]:
        cache.advance_time(now)
        if step == "take":
            seq = cache.cache.hold_cached(prompt(1, 4)) if now == 8 else cache.prefilled(prompt(1, 4))
        elif step == "free" and now == 3:
            cache.free(seq)
        elif step == "free":
            cache.cache.pool.free_blocks(seq)
        else:
            cache.allocate(prompt(2, 4))
    found = cache.residency()
    assert found.sample == 1
    assert (found.lifetime.num_samples, found.lifetime.total, found.lifetime.mean) == (1, 24, 24)
    assert (found.idle_before_evict.num_samples, found.idle_before_evict.total) == (1, 16)
    assert (found.reuse_gap.num_samples, found.reuse_gap.total) == (1, 5)
    # 24 is above 16 and at most 32; 16 is at most 16; 5 is at most 8.
    assert [found.lifetime.counts[BOUNDS.index(32)], found.idle_before_evict.counts[BOUNDS.index(16)]] == [1, 1]
    assert found.reuse_gap.counts[BOUNDS.index(8)] == 1


def test_a_held_block_that_is_shared_is_used_again() -> None:
    cache = followed()
    cache.prefilled(prompt(1, 4), [7])
    cache.advance_time(10)
    cache.allocate([*prompt(1, 4), 8])
    assert cache.residency().reuse_gap.total == 10


def test_a_block_that_caches_nothing_ends_without_an_eviction() -> None:
    cache = followed(num_blocks=2)
    for now in range(5):
        cache.advance_time(now)
        cache.free(cache.prefilled([now, now]))
    assert cache.residency().lifetime.num_samples == 0


def test_reset_is_not_counted_as_eviction() -> None:
    cache = followed(num_blocks=2)
    cache.free(cache.prefilled(prompt(1, 4)))
    cache.reset_prefix_cache()
    cache.prefilled(prompt(1, 4))
    assert cache.residency().lifetime.num_samples == 0


def test_blocks_lost_to_a_smaller_pool_count_as_evicted() -> None:
    cache = followed(num_blocks=4)
    cache.free(cache.prefilled(prompt(1, 12)))
    cache.advance_time(6)
    cache.resize(2)
    assert (cache.residency().lifetime.num_samples, cache.residency().lifetime.total) == (2, 12)


@pytest.mark.parametrize(("duration", "bucket"), [(0, 0), (2.0**-10, 0), (0.001, 1), (1, 10), (1.5, 11), (2**21, 31)])
def test_the_buckets_are_powers_of_two(duration: float, bucket: int) -> None:
    cache = followed(num_blocks=2)
    cache.free(cache.prefilled(prompt(1, 4)))
    cache.advance_time(duration)
    cache.allocate(prompt(2, 4))
    assert cache.residency().lifetime.bounds == BOUNDS
    assert cache.residency().lifetime.counts[bucket] == 1
    assert cache.residency().lifetime.total == duration


def test_only_every_so_many_th_block_is_followed() -> None:
    cache = followed(num_blocks=10, sample=3)
    cache.free(cache.prefilled(prompt(1, 36)))
    cache.allocate(prompt(2, 36))
    # Blocks 3, 6 and 9 of nine.
    assert cache.residency().lifetime.num_samples == 3
    assert cache.residency().sample == 3


def test_before_anything_happened_the_means_are_0() -> None:
    found = followed().residency()
    assert (found.lifetime.num_samples, found.lifetime.mean, found.reuse_gap.mean) == (0, 0, 0)


def test_residency_is_rejected_if_sampling_is_off() -> None:
    with pytest.raises(InvalidArgument, match="residency_sample is 0"):
        Checked().residency()
    for bad in (-1, 2**27 + 1, 0.5, True):
        with pytest.raises(InvalidArgument, match="residency_sample"):
            KVCacheManager(CacheConfig(4, observe=ObserveConfig(residency_sample=bad)))


@pytest.mark.parametrize("sample", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eviction_policy": "s3fifo", "partial_hits": True},
        {"groups": (LayerGroup(4), LayerGroup(4, 6))},
        {"num_cpu_blocks": 10},
    ],
)
def test_at_random_the_histograms_are_those_of_the_events(sample: int, settings: dict[str, Any]) -> None:
    generator = random.Random(run_seed())
    cache = followed(24, sample, **settings)
    now, seqs = 0.0, list[int]()
    for step in range(2000):
        # Of every fifth content few come back: some seeds have no gap after a hundred steps.
        found = cache.residency()
        if step >= 100 and found.lifetime.num_samples and found.reuse_gap.num_samples:
            break
        now += generator.choice((0, 0.001, 0.7, 30.0)) * generator.random()
        cache.advance_time(now)
        tokens = [generator.choice((1, 1, 2)) for _ in range(generator.randint(1, 24))]
        if cache.can_allocate(tokens) is Admission.OK and len(seqs) < 6:
            seqs.append(cache.allocate(tokens))
            cache.try_compute(seqs[-1])
        if seqs and generator.random() < 0.8:
            cache.free(seqs.pop(generator.randrange(len(seqs))))
        if generator.random() < 0.05:
            cache.resize(generator.randint(20, 30))
    lifetimes, idle, gaps = durations(cache.history(), sample)
    assert found.lifetime == histogram(lifetimes)
    assert found.idle_before_evict == histogram(idle)
    assert found.reuse_gap == histogram(gaps)
    assert lifetimes
    assert gaps
