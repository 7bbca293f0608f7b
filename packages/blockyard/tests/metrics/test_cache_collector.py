"""What a cache tells Prometheus: against the cache itself, in a world of random calls, and what is refused."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from blockyard import (
    Admission,
    BlockPool,
    CacheConfig,
    CacheSalt,
    ConcurrentCall,
    CPUPoolConfig,
    InvalidArgument,
    KVCacheManager,
    LayerGroup,
    ObserveConfig,
    OverBudget,
    StateSpec,
)
from blockyard.config import cache_config
from blockyard.metrics import BlockStates, CacheCollector, CacheReading
from blockyard.tenants import Tenant
from blockyard_testing.own_policies import MRU
from blockyard_testing.places import child_environment
from blockyard_testing.prometheus import check_metrics
from blockyard_testing.seeds import run_seed

FOLLOWED = CacheConfig(
    num_blocks=40,
    block_size=4,
    max_num_seqs=8,
    max_model_len=64,
    observe=ObserveConfig(track_misses=True, residency_sample=1),
)


def samples(collector: Collector) -> dict[str, float]:
    """Samples by name and the labels that are not every metric's: `kv_blocks state=idle`."""
    found = {}
    for family in collector.collect():
        for sample in family.samples:
            own = [f"{name}={text}" for name, text in sample.labels.items() if name not in ("engine", "model_name")]
            found[" ".join([sample.name, *own])] = sample.value
    return found


def busy(cache: KVCacheManager, number: int) -> Iterator[None]:
    """Random calls: prompts that share beginnings, decodes, preemptions, ends."""
    random.seed(run_seed())
    running: list[int] = []
    for step in range(number):
        cache.advance_time(float(step))
        tokens = [*range(random.choice([4, 8, 16])), *random.choices(range(100, 103), k=random.randrange(1, 12))]
        answer = cache.try_allocate(tokens, resumed=random.random() < 0.2)
        if not isinstance(answer, Admission):
            running.append(answer)
        plan = cache.reserve(running)
        cache.commit(running, plan.num_scheduled, [7 if fits else -1 for fits in plan.fits])
        while running and (random.random() < 0.4 or cache.num_free_blocks < 8):
            cache.free(running.pop(random.randrange(len(running))))
        for seq in [seq for seq in running if cache.num_tokens(seq) == FOLLOWED.max_model_len]:
            cache.free(seq)
            running.remove(seq)
        yield


def test_metrics_match_the_cache() -> None:
    cache = KVCacheManager(FOLLOWED)
    collector = CacheCollector(cache)
    for _ in busy(cache, 300):
        found, stats, misses = samples(collector), cache.stats(), cache.miss_totals()
        assert found["vllm:kv_cache_usage_perc"] == cache.usage
        assert found["vllm:prefix_cache_queries_total"] == stats.num_prompt_tokens
        assert found["vllm:prefix_cache_hits_total"] == stats.num_hit_tokens == misses.num_hit
        assert found["blockyard:kv_blocks_evicted_total"] == stats.num_evicted_blocks
        missed = sum(value for name, value in found.items() if name.startswith("blockyard:missed_tokens_total"))
        not_hit = stats.num_prompt_tokens - stats.num_hit_tokens
        assert missed - misses.num_recomputed - tail_of_resumed(found, stats.num_resumed_tokens) == not_hit
        sources = [
            found[f"vllm:prompt_tokens_by_source_total source={each}"] for each in ("local_compute", "local_cache_hit")
        ]
        assert sources == [not_hit, stats.num_hit_tokens]
        states = [found[f"blockyard:kv_blocks state={each}"] for each in ("private", "shared", "idle", "free")]
        assert sum(states) == cache.config.num_blocks - 1
        assert states[0] + states[1] == stats.num_used_blocks
        assert states[1] + states[2] == stats.num_cached_blocks
        assert found["vllm:kv_block_lifetime_seconds_count"] == stats.num_evicted_blocks
    assert stats.num_evicted_blocks > 20
    assert misses.num_evicted > 0


def tail_of_resumed(found: dict[str, float], num_resumed: int) -> float:
    """A preempted request's tokens behind its last block count as tail, and it is no query."""
    return (
        num_resumed
        - found["blockyard:resumed_hit_tokens_total"]
        - found["blockyard:missed_tokens_total cause=recomputed"]
    )


def test_every_state_of_a_block() -> None:
    cache = KVCacheManager(CacheConfig(num_blocks=12, block_size=4, max_num_seqs=4, max_model_len=40))
    ended = cache.allocate(list(range(8)))
    cache.commit([ended], cache.reserve([ended]).num_scheduled)
    cache.free(ended)  # two blocks idle
    cache.allocate([*range(4), 50, 51])  # takes the first of them, and a block of its own
    lease = cache.pool.get_new_blocks(8)
    cache.resize(6)
    states = BlockStates.of(cache.pool)
    assert states == BlockStates(private=3, shared=1, idle=1, free=0, retiring=6)
    assert states.retiring == cache.pool.num_retiring_blocks
    cache.pool.free_blocks(lease)
    assert BlockStates.of(cache.pool) == BlockStates(private=1, shared=1, idle=1, free=2, retiring=0)


def test_bare_pool_has_no_metrics_of_sequences() -> None:
    pool = BlockPool(12, 4)
    cached = pool.get_new_blocks(3)
    pool.cache_full_blocks(cached, list(range(12)))
    pool.free_blocks(cached)
    held = pool.get_new_blocks(9)
    found = samples(CacheCollector(pool))
    assert {name: value for name, value in found.items() if "info" not in name} == {
        "vllm:kv_cache_usage_perc": 9 / 11,
        "blockyard:kv_blocks state=private": 9,
        "blockyard:kv_blocks state=shared": 0,
        "blockyard:kv_blocks state=idle": 2,
        "blockyard:kv_blocks state=free": 0,
        "blockyard:kv_blocks state=retiring": 0,
        "blockyard:kv_blocks_used": 9,
        "blockyard:kv_blocks_free": 2,
        "blockyard:kv_blocks_cached": 2,
        "blockyard:kv_blocks_used_peak": 9,
        "blockyard:kv_blocks_allocated_total": 12,
        "blockyard:kv_blocks_evicted_total": 1,
    }
    assert found["vllm:cache_config_info block_size=4 num_gpu_blocks=12 enable_prefix_caching=True"] == 1
    collector = CacheCollector(pool)
    collector.add(KVCacheManager(FOLLOWED), engine="1")
    registry = CollectorRegistry()
    registry.register(collector)
    check_metrics(generate_latest(registry).decode())
    labels = {"engine": "0", "model_name": ""}
    assert registry.get_sample_value("blockyard:kv_blocks_evicted_total", labels) == 1
    assert registry.get_sample_value("vllm:prefix_cache_hits_total", labels) is None
    assert registry.get_sample_value("vllm:prefix_cache_hits_total", labels | {"engine": "1"}) == 0
    pool.free_blocks(held)


def test_retained_blocks_are_those_counted_by_hand() -> None:
    """Against wishes that run out, go with their block, and are taken back; of several layer groups too."""
    groups = (LayerGroup(4), LayerGroup(4, sliding_window=8))
    for more in ({}, {"groups": groups}):
        config = cache_config(
            num_blocks=60, block_size=4, max_num_seqs=4, max_model_len=64, retention_blocks=50, **more
        )
        cache = KVCacheManager(config)
        collector = CacheCollector(cache)
        random.seed(run_seed())
        seen = set()
        for step in range(400):
            cache.advance_time(float(step))
            tokens = [random.randrange(5), *range(random.choice([7, 11, 15]))]
            seq = cache.allocate(tokens)
            cache.commit([seq], cache.reserve([seq]).num_scheduled)
            cache.free(seq)
            with contextlib.suppress(OverBudget):
                cache.retain(tokens, priority=random.randrange(3), expires_at=random.choice([None, step + 5.0]))
            if random.random() < 0.02:
                cache.reset_prefix_cache()
            retention = cache._evict.order.stack.layers[0]
            by_hand = sum(retention.is_retained(block) for block in range(config.num_blocks))
            found = samples(collector)["blockyard:kv_blocks_retained"]
            assert found == by_hand == cache.num_retained_blocks == cache.stats().num_retained_blocks
            seen.add(by_hand)
        assert len(seen) > 8
    assert not any("retained" in name for name in samples(CacheCollector(KVCacheManager(FOLLOWED))))


def test_states_are_counted_where_a_model_has_any() -> None:
    groups = (LayerGroup(4, token_bytes=1), StateSpec(state_bytes=8, checkpoint_every=4))
    cache = KVCacheManager(CacheConfig(num_blocks=20, groups=groups, max_num_seqs=4, max_model_len=64))
    seq = cache.allocate(list(range(9)))
    cache.commit([seq], cache.reserve([seq]).num_scheduled)
    found = samples(CacheCollector(cache))
    events = ("written", "kept", "replaced", "refused")
    assert [found[f"blockyard:kv_states_total event={event}"] for event in events] == [1, 1, 0, 0]
    assert not any("kv_states" in name for name in samples(CacheCollector(KVCacheManager(FOLLOWED))))


def test_first_hundred_tenants_are_shown_by_name() -> None:
    many = tuple(Tenant(f"t{number}", min_blocks=int(number == 3)) for number in range(150))
    config = replace(FOLLOWED, num_blocks=1002, tenants=many)
    cache = KVCacheManager(config)
    for name in ("t3", "t3", "t120", "nobody"):
        cache.allocate([1] * 9, extra_keys=(CacheSalt(name),))
    found = samples(CacheCollector(cache))
    held = {name: value for name, value in found.items() if "share_blocks_held" in name}
    assert len(held) == 101
    names = ("t3", "*", "t5", "(others)")
    assert [held[f"blockyard:share_blocks_held tenant={name}"] for name in names] == [4, 3, 0, 3]
    assert found["blockyard:share_blocks tenant=t3"] == 1 + 1000 // 151
    assert found["blockyard:share_blocks_evicted_total tenant=t3"] == 0
    assert [found[f"blockyard:share_blocks_{name} tenant=t3"] for name in ("floor", "retained", "idle")] == [1, 0, 0]
    assert "blockyard:kv_block_bytes" not in found, "nobody said what a token takes"
    known = KVCacheManager(replace(config, groups=(LayerGroup(4, token_bytes=10),)))
    assert samples(CacheCollector(known))["blockyard:kv_block_bytes"] == 40
    assert not any("t120" in name for name in found), "of the others nothing is told"
    registry = CollectorRegistry()
    registry.register(CacheCollector(cache))
    check_metrics(generate_latest(registry).decode())
    assert not any("share_blocks" in name for name in samples(CacheCollector(KVCacheManager(FOLLOWED))))


def test_hits_by_medium_are_absent_if_not_counted() -> None:
    tiered = KVCacheManager(CacheConfig(num_blocks=12, block_size=4, cpu=CPUPoolConfig(num_blocks=9)))
    found = samples(CacheCollector(tiered))
    assert found["blockyard:cpu_kv_blocks state=free"] == 8
    assert not any("hit_tokens_total medium" in name or "cached_by_source" in name for name in found)
    found = samples(CacheCollector(lambda: CacheReading.of(tiered, num_cpu_hit_tokens=0)))
    assert found["blockyard:hit_tokens_total medium=cpu"] == 0
    assert found["vllm:prompt_tokens_cached_by_source_total source=host"] == 0


def test_metrics_of_disabled_features_are_absent() -> None:
    found = samples(CacheCollector(KVCacheManager(CacheConfig(num_blocks=8))))
    assert not any("missed_tokens" in name or "kv_block_" in name or "preemptions" in name for name in found)
    assert found["blockyard:hit_tokens_total medium=gpu"] == 0


def test_two_engines_of_a_process_are_both_exported() -> None:
    first, second = KVCacheManager(CacheConfig(num_blocks=8)), KVCacheManager(FOLLOWED)
    collector = CacheCollector(first, engine="0", model_name="m")
    collector.add(second, engine="1")
    seq = second.allocate(list(range(30)))
    second.commit(seq, second.reserve(seq).num_scheduled)
    registry = CollectorRegistry()
    registry.register(collector)

    def queries(engine: str) -> float | None:
        return registry.get_sample_value("vllm:prefix_cache_queries_total", {"engine": engine, "model_name": "m"})

    assert (queries("0"), queries("1"), queries("2")) == (0, 30, None)
    with pytest.raises(InvalidArgument, match="engine is '1'; a cache of this name exists"):
        collector.add(first, engine="1")


def test_a_registry_refuses_the_same_names_twice() -> None:
    registry = CollectorRegistry()
    registry.register(CacheCollector(KVCacheManager(CacheConfig(num_blocks=8))))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(CacheCollector(KVCacheManager(CacheConfig(num_blocks=8)), engine="1"))


def test_exported_text_is_well_formed_without_noise() -> None:
    cache = KVCacheManager(FOLLOWED)
    for _ in busy(cache, 50):
        pass
    registry = CollectorRegistry()
    registry.register(CacheCollector(cache, model_name='a "name"\nof two lines'))
    page = generate_latest(registry).decode()
    assert "_created" not in page
    assert all('engine="0"' in line for line in page.splitlines() if not line.startswith("#"))
    check_metrics(page)


@pytest.mark.parametrize("cache", [None, 3, "cache", CacheConfig(num_blocks=8)])
def test_other_objects_are_rejected(cache: object) -> None:
    with pytest.raises(InvalidArgument, match="must be a KVCacheManager, a pool, or a function"):
        CacheCollector(cache)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"engine": 0}, {"model_name": None}, {"info": {"a": 1}}, {"info": {1: "a"}}])
def test_labels_are_text(options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="must be a string"):
        CacheCollector(KVCacheManager(CacheConfig(num_blocks=8)), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"engine": "\udcff"}, {"model_name": "\udcff"}, {"info": {"a": "\udcff"}}])
def test_labels_are_text_that_can_be_written(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="must be valid Unicode"):
        CacheCollector(KVCacheManager(CacheConfig(num_blocks=8)), **options)


def test_without_prometheus_client_the_extra_is_named() -> None:
    code = (
        "import sys\nsys.modules['prometheus_client'] = None\nimport blockyard\n"
        "try:\n    import blockyard.metrics\nexcept blockyard.errors.MissingExtra as error:\n    print(error)\n"
    )
    assert run(code) == "blockyard.metrics needs prometheus_client: pip install 'blockyard[metrics]'\n"


def test_the_package_alone_imports_no_client_of_prometheus() -> None:
    assert run("import sys, blockyard\nprint('prometheus_client' in sys.modules)") == "False\n"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=None, env=child_environment(), timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_scrape_in_the_middle_of_a_call_is_answered_and_disturbs_nothing() -> None:
    """Where any other call would raise `ConcurrentCall`: while a policy is asked."""
    pages: list[dict[str, float]] = []

    class Scraping(MRU):
        def evict(self) -> int:
            pages.append(samples(collector))
            with pytest.raises(ConcurrentCall):
                cache.history()
            return super().evict()

    cache = KVCacheManager(
        CacheConfig(8, 4, eviction_policy=Scraping, observe=ObserveConfig(track_misses=True, residency_sample=1))
    )
    collector = CacheCollector(cache)
    for first in (0, 100, 200):
        seq = cache.allocate(list(range(first, first + 24)))
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        cache.free(seq)
        cache.check()
    assert len(pages) > 5
    assert all(sum(value for name, value in page.items() if "kv_blocks state" in name) == 7 for page in pages)


def test_scrapes_from_another_thread_refuse_no_call() -> None:
    cache, is_over = KVCacheManager(FOLLOWED), threading.Event()
    collector = CacheCollector(cache)

    def scrape() -> int:
        count = 0
        while not is_over.is_set():
            samples(collector)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        scraping = pool.submit(scrape)
        try:
            for _ in busy(cache, 300):
                cache.check()
        finally:
            is_over.set()
        assert scraping.result(60) > 0
    assert samples(collector)["vllm:prefix_cache_queries_total"] == cache.stats().num_prompt_tokens
