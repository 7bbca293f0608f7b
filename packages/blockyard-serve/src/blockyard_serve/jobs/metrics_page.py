"""The text of GET /metrics: metrics of the cache, the engine and its requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blockyard.metrics import CacheCollector, KVEventCollector
from blockyard_engine import Engine

from .engine_reading import EngineCollector, EngineReading
from .engine_thread import EngineThread

if TYPE_CHECKING:
    from blockyard_tiers import OffloadReading, TierReading

#: Seconds that a scrape waits for the engine's step; after that it shows the previous reading.
_PATIENCE_SECONDS = 1.0
#: Seconds for which scrapes share a page while requests run: each reading delays a step.
SHARE_SECONDS = 0.1


class Page(Protocol):
    """Renders GET /metrics."""

    async def text(self) -> bytes:
        """Return the current metrics as Prometheus text."""
        ...


class MetricsPage:
    """All metrics of a server.

    Args:
        thread: thread of the engine, which is read between two steps.
        others: further collectors.
    """

    def __init__(self, thread: EngineThread, engine: Engine, others: Iterable[Collector] = ()) -> None:
        self._thread = thread
        self._pending: Future[EngineReading] | None = None
        self._page = b""
        self._made_at = -math.inf
        self._making: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry(auto_describe=True)
        labels = thread.labels
        info = {"cache_dtype": str(engine.kv_cache.dtype).removeprefix("torch."), "device": str(engine.kv_cache.device)}
        self._registry.register(CacheCollector(lambda: thread.reading.cache, **labels, info=info))
        self._registry.register(EngineCollector(lambda: thread.reading, labels))
        self._registry.register(thread.request_metrics)
        if engine.kv_events is not None:
            self._registry.register(KVEventCollector(engine.kv_events.stats, **labels))
        if engine.offload is not None:
            self._registry.register(TierCollector(lambda: thread.reading.offload, labels))
        if thread.tenants is not None:
            self._registry.register(thread.tenants)
        ProcessCollector(registry=self._registry)
        for other in others:
            self._registry.register(other)

    async def text(self) -> bytes:
        """Return the metrics as Prometheus text.

        Waits at most a second for the current step; then the engine's metrics are those of the last page. Concurrent
        scrapes share a page; while requests run, so do scrapes within `SHARE_SECONDS`.
        """
        if self._making is None or self._making.done():
            if self._thread.is_busy and time.monotonic() - self._made_at < SHARE_SECONDS:
                return self._page
            self._making = asyncio.ensure_future(self._make())
        await asyncio.shield(self._making)
        return self._page

    async def _make(self) -> None:
        if self._pending is None or self._pending.done():
            self._pending = self._thread.read()
        waiter = asyncio.wrap_future(self._pending)
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # the thread may have ended
        await asyncio.wait([waiter], timeout=_PATIENCE_SECONDS)
        self._page, self._made_at = generate_latest(self._registry), time.monotonic()


#: Help text and value of each tier's metrics.
_COUNTERS: dict[str, tuple[str, Callable[[TierReading], float]]] = {
    "blockyard:tier_hit_tokens": ("Prompt tokens loaded from a tier.", lambda seen: seen.num_hit_tokens),
    "blockyard:tier_loaded_bytes": ("Bytes loaded.", lambda seen: seen.stats.loaded_bytes),
    "blockyard:tier_stored_bytes": ("Bytes stored.", lambda seen: seen.stats.stored_bytes),
    "blockyard:tier_load_seconds": ("Thread seconds of loads.", lambda seen: seen.stats.load_seconds),
    "blockyard:tier_store_seconds": ("Thread seconds of stores.", lambda seen: seen.stats.store_seconds),
    "blockyard:tier_evicted_objects": (
        "Objects evicted by the budget.",
        lambda seen: seen.stats.num_evicted,
    ),
    "blockyard:tier_skipped_objects": (
        "Objects not stored: too slow.",
        lambda seen: seen.num_skipped,
    ),
}
_GAUGES: dict[str, tuple[str, Callable[[TierReading], float]]] = {
    "blockyard:tier_objects": ("Objects known to be stored.", lambda seen: seen.stats.num_objects),
    "blockyard:tier_object_bytes": ("Bytes of these objects.", lambda seen: seen.stats.object_bytes),
    "blockyard:tier_waiting_bytes": ("Bytes of waiting and running transfers.", lambda seen: seen.stats.waiting_bytes),
}
_FAILURES = "blockyard:tier_failures"
_OPEN = "blockyard:tier_circuit_open"
_MISSED = "blockyard:tier_missed_tokens"
_LOADING = "blockyard:tier_waiting_requests"


class TierCollector(Collector):
    """Collector of an engine's tiers.

    Args:
        read: returns the latest reading.
        labels: labels of every metric.
    """

    def __init__(self, read: Callable[[], OffloadReading | None], labels: dict[str, str]) -> None:
        self._read = read
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of one reading. O(tiers * causes)."""
        seen = self._read()
        if seen is not None:
            yield from self._of_tiers(seen)
            yield from self._of_all(seen)

    def _of_tiers(self, seen: OffloadReading) -> Iterator[Metric]:
        from blockyard_tiers import Cause  # installed, because the engine has tiers

        names = [*self._names, "tier"]
        for kind, rows in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, (text, value) in rows.items():
                metric = kind(name, text, labels=names)
                for tier in seen.tiers:
                    metric.add_metric([*self._values, tier.name], value(tier))
                yield metric
        failures = CounterMetricFamily(_FAILURES, "Objects and jobs that failed.", labels=[*names, "what", "cause"])
        circuits = GaugeMetricFamily(_OPEN, "1 while the circuit breaker is open.", labels=[*names, "what"])
        for tier in seen.tiers:
            labels, stats = [*self._values, tier.name], tier.stats
            for what, counts in (
                ("load", stats.load_misses),
                ("store", stats.store_failures),
                ("refused", stats.refusals),
            ):
                for cause in Cause:  # exported at 0, so that an alert sees the first failure
                    failures.add_metric([*labels, what, cause.name.lower()], counts[cause])
            circuits.add_metric([*labels, "load"], stats.is_load_failing)
            circuits.add_metric([*labels, "store"], stats.is_store_failing)
        yield failures
        yield circuits

    def _of_all(self, seen: OffloadReading) -> Iterator[Metric]:
        missed = CounterMetricFamily(_MISSED, "Prompt tokens that no tier supplied.", labels=[*self._names, "cause"])
        for cause, count in seen.missed_tokens.items():
            missed.add_metric([*self._values, cause], count)
        yield missed
        loading = GaugeMetricFamily(_LOADING, "Requests that wait for a tier.", labels=self._names)
        loading.add_metric(self._values, seen.num_waiting)
        yield loading
