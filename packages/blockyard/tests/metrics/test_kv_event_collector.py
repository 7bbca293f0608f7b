"""A publisher of KV events as metrics: what it did is what they say."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("prometheus_client")
pytest.importorskip("zmq")

import zmq
from prometheus_client import CollectorRegistry

from blockyard import CacheConfig, InvalidArgument, KVCacheManager, ObserveConfig
from blockyard.events import KVEventPublisher, Mirror, Subscriber
from blockyard.events.following import subscriber
from blockyard.events.publishing import publisher as publishing
from blockyard.metrics import CacheCollector, KVEventCollector
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until

LABELS = {"engine": "3", "model_name": "m"}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"blockyard:kv_events_{name}", LABELS | labels)


def test_metrics_match_the_publishers_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "REPLAY_PATIENCE", PATIENCE_SECONDS)  # it asks once, however slow the machine is
    cache = KVCacheManager(CacheConfig(20, 4, observe=ObserveConfig(enable_kv_cache_events=True)))
    with KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=3600.0) as publisher:
        registry = CollectorRegistry()
        registry.register(CacheCollector(cache, **LABELS))
        registry.register(KVEventCollector(publisher.stats, **LABELS))
        assert [value(registry, name) for name in ("running", "messages_total", "waiting")] == [1, 0, 0]
        seq = cache.allocate(list(range(8)))
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        publisher.publish()
        wait_until(lambda: value(registry, "messages_total") == 1)
        assert 60 < (value(registry, "bytes_total") or 0) < 400
        assert value(registry, "heartbeats_total") == 0
        with Subscriber(Mirror()) as reader:
            reader.follow("worker", publisher.endpoint, publisher.replay_endpoint)
            assert reader.wait_until_live(PATIENCE_SECONDS)
            wait_until(lambda: value(registry, "replays_total", outcome="answered") == 1)
        assert value(registry, "snapshots_total") == 1
        assert value(registry, "snapshot_bytes_total") == pytest.approx(value(registry, "bytes_total"), abs=60)
        ask(publisher.replay_endpoint, [b"", b"what?"])
        wait_until(lambda: value(registry, "replays_total", outcome="refused") == 1)
        assert value(registry, "replays_total", outcome="given_up") == 0
        assert value(registry, "subscribers_cut_total") == 0
        with zmq.Context() as context, context.socket(zmq.SUB) as hostile:
            hostile.setsockopt(zmq.LINGER, 0)
            hostile.connect(publisher.endpoint)
            for number in range(65):
                hostile.setsockopt(zmq.SUBSCRIBE, b"%d" % number)
            wait_until(lambda: (value(registry, "subscribers_cut_total") or 0) >= 1)
        monkeypatch.setattr(publishing, "FEW_WAITING", 1)
        apply, goes_on = publisher._feed.apply, threading.Event()
        publisher._feed.apply = lambda changes: goes_on.wait(PATIENCE_SECONDS) and apply(changes)  # type: ignore[method-assign]
        for number, expected in enumerate((1, 2, 2)):  # the first is taken in, the third merged with the second
            seq = cache.allocate([number, 7, 7, 7])
            cache.commit([seq], cache.reserve([seq]).num_scheduled)
            publisher.publish()
            wait_until(lambda: publisher._in_hand is not None)
            assert value(registry, "waiting") == expected
        assert value(registry, "merged_total") == 1
        goes_on.set()
    assert value(registry, "running") == 0
    assert (value(registry, "message_age_seconds") or 0) > 0


def test_heartbeats_are_counted_and_end_the_age() -> None:
    cache = KVCacheManager(CacheConfig(20, 4, observe=ObserveConfig(enable_kv_cache_events=True)))
    with KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=0.02) as publisher:
        wait_until(lambda: publisher.stats().num_heartbeats > 3)
        seen = publisher.stats()
        assert seen.num_messages == seen.num_heartbeats
        assert 0 <= seen.seconds_since_message < PATIENCE_SECONDS


def test_stats_may_be_read_from_any_thread() -> None:
    cache = KVCacheManager(CacheConfig(20, 4, observe=ObserveConfig(enable_kv_cache_events=True)))
    with KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=0.001) as publisher:
        seen: list[int] = []
        threads = [
            threading.Thread(target=lambda: seen.extend(publisher.stats().num_messages for _ in range(200)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for _ in range(100):
            publisher.publish()
        for thread in threads:
            thread.join()
    assert len(seen) == 600


@pytest.mark.parametrize("given", [None, 7, "stats"])
def test_values_that_are_not_functions_are_rejected(given: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a publisher's `stats`"):
        KVEventCollector(given)


def ask(endpoint: str, request: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        socket.send_multipart(request)
