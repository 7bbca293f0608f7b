"""What Prometheus gets under GET /metrics: the cache, the engine and the requests of a server."""

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

#: Seconds that a scrape waits for the engine's step to end; then it shows the reading before.
_PATIENCE_SECONDS = 1.0
#: Seconds for which scrapes get the same page while requests run: a reading takes place between two steps.
SHARE_SECONDS = 0.1


class Page(Protocol):
    """Makes what Prometheus gets."""

    async def text(self) -> bytes:
        """Return the page as it is now."""
        ...


class MetricsPage:
    """All metrics of a server as one page. thread: of the engine, which is read between two of its steps. others: more
    that the page shows."""

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
        self._registry.register(thread.request_figures)
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
        """Return the page as it is now, or after a second with the engine as it was.

        Scrapes at one time share a page, and while requests run also those within `SHARE_SECONDS`.
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
        waiter.add_done_callback(lambda done: done.cancelled() or done.exception())  # a thread that ended says so
        await asyncio.wait([waiter], timeout=_PATIENCE_SECONDS)
        self._page, self._made_at = generate_latest(self._registry), time.monotonic()


#: Name: (what it is, how it is read), of each tier.
_COUNTERS: dict[str, tuple[str, Callable[[TierReading], float]]] = {
    "blockyard:tier_hit_tokens": ("Prompt tokens that a tier brought.", lambda seen: seen.num_hit_tokens),
    "blockyard:tier_loaded_bytes": ("Bytes loaded.", lambda seen: seen.stats.loaded_bytes),
    "blockyard:tier_stored_bytes": ("Bytes stored.", lambda seen: seen.stats.stored_bytes),
    "blockyard:tier_load_seconds": ("Seconds of its threads for loads.", lambda seen: seen.stats.load_seconds),
    "blockyard:tier_store_seconds": ("Seconds of its threads for stores.", lambda seen: seen.stats.store_seconds),
    "blockyard:tier_evicted_objects": ("Objects that the budget evicted.", lambda seen: seen.stats.num_evicted),
    "blockyard:tier_skipped_objects": ("Objects not stored: it was too slow.", lambda seen: seen.num_skipped),
}
_GAUGES: dict[str, tuple[str, Callable[[TierReading], float]]] = {
    "blockyard:tier_objects": ("Objects known to be there.", lambda seen: seen.stats.num_objects),
    "blockyard:tier_object_bytes": ("Their bytes.", lambda seen: seen.stats.object_bytes),
    "blockyard:tier_waiting_bytes": ("Bytes of jobs that wait or run.", lambda seen: seen.stats.waiting_bytes),
}
_FAILURES = "blockyard:tier_failures"
_OPEN = "blockyard:tier_circuit_open"
_MISSED = "blockyard:tier_missed_tokens"
_LOADING = "blockyard:tier_waiting_requests"


class TierCollector(Collector):
    """This shows an engine's tiers. read: gives the latest reading. labels: by name, the same for all metrics."""

    def __init__(self, read: Callable[[], OffloadReading | None], labels: dict[str, str]) -> None:
        self._read = read
        self._names, self._values = list(labels), list(labels.values())

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics, of one moment. O(tiers * causes)."""
        seen = self._read()
        if seen is not None:
            yield from self._of_tiers(seen)
            yield from self._of_all(seen)

    def _of_tiers(self, seen: OffloadReading) -> Iterator[Metric]:
        from blockyard_tiers import Cause  # needs the extra that the engine's tiers needed

        names = [*self._names, "tier"]
        for kind, rows in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, (text, value) in rows.items():
                metric = kind(name, text, labels=names)
                for tier in seen.tiers:
                    metric.add_metric([*self._values, tier.name], value(tier))
                yield metric
        failures = CounterMetricFamily(_FAILURES, "Objects and jobs that failed.", labels=[*names, "what", "cause"])
        circuits = GaugeMetricFamily(_OPEN, "1 while it is left alone, being ill.", labels=[*names, "what"])
        for tier in seen.tiers:
            labels, stats = [*self._values, tier.name], tier.stats
            for what, counts in (
                ("load", stats.load_misses),
                ("store", stats.store_failures),
                ("refused", stats.refusals),
            ):
                for cause in Cause:  # from the start, so that an alert sees the first one
                    failures.add_metric([*labels, what, cause.name.lower()], counts[cause])
            circuits.add_metric([*labels, "load"], stats.is_load_failing)
            circuits.add_metric([*labels, "store"], stats.is_store_failing)
        yield failures
        yield circuits

    def _of_all(self, seen: OffloadReading) -> Iterator[Metric]:
        missed = CounterMetricFamily(_MISSED, "Prompt tokens that no tier brought.", labels=[*self._names, "cause"])
        for cause, count in seen.missed_tokens.items():
            missed.add_metric([*self._values, cause], count)
        yield missed
        loading = GaugeMetricFamily(_LOADING, "Requests that wait for a tier.", labels=self._names)
        loading.add_metric(self._values, seen.num_waiting)
        yield loading
