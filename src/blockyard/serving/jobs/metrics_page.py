"""What Prometheus gets under GET /metrics: the cache, the engine and the requests of a server."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from ...engine import Engine
from ...metrics import CacheCollector, KVEventCollector
from .engine_reading import EngineCollector, EngineReading
from .engine_thread import EngineThread
from .tier_collector import TierCollector

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
