"""Collectors for prometheus_client: of the caches of a process, and of a publisher of KV events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..arguments import require_str, require_unicode, shown
from ..core.manager import KVCacheManager
from ..core.pools.lease_pool import LeasePool
from ..errors import InvalidArgument
from ..kv_events import PublisherStats
from .families import FAMILIES, RESIDENCY, Labels
from .reading import CacheReading


def _label(name: str, text: object) -> str:
    return require_unicode(name, require_str(name, text))


#: A manager, a pool without a manager, or a function that reads either.
Source = KVCacheManager | LeasePool | Callable[[], CacheReading]


class CacheCollector(Collector):
    """Metrics of a `KVCacheManager` for any registry of prometheus_client, with the names of vLLM's dashboards.

    A scrape is O(num_blocks + max_num_seqs).

    Args:
        cache: the manager, or a pool without one, whose metrics exclude those of sequences and tokens. It is read in
            the scraping thread without a lock, so a scrape may see another thread's call half done, but never fails.
            Or a function that returns a `CacheReading`, for programs that use a lock or count preemptions.
        engine: label that distinguishes the engines of a process.
        model_name: label of the model.
        info: further labels of `vllm:cache_config_info`.

    Raises:
        InvalidArgument: `cache` is none of these, or a label is not a string.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> from prometheus_client import CollectorRegistry
    >>> registry = CollectorRegistry()
    >>> registry.register(CacheCollector(KVCacheManager(CacheConfig(num_blocks=9))))
    >>> registry.get_sample_value("blockyard:kv_blocks", {"engine": "0", "model_name": "", "state": "free"})
    8.0
    """

    def __init__(
        self, cache: Source, *, engine: str = "0", model_name: str = "", info: Mapping[str, str] | None = None
    ) -> None:
        self._model_name = _label("model_name", model_name)
        self._info = {_label("info", name): _label(f"info[{name!r}]", text) for name, text in (info or {}).items()}
        self._sources: dict[str, Callable[[], CacheReading]] = {}
        self.add(cache, engine)

    def add(self, cache: Source, engine: str) -> None:
        """Add another cache of the process, under another `engine`: a registry accepts each metric name once.

        Raises `InvalidArgument` like the constructor, and if `engine` exists.
        """
        if _label("engine", engine) in self._sources:
            raise InvalidArgument(f"engine is {engine!r}; a cache of this name exists")
        if isinstance(cache, KVCacheManager):
            self._sources[engine] = partial(CacheReading.of, cache)
        elif isinstance(cache, LeasePool):
            self._sources[engine] = partial(CacheReading.of_pool, cache)
        elif callable(cache):
            self._sources[engine] = cache
        else:
            raise InvalidArgument(
                f"cache is {shown(cache)}; it must be a KVCacheManager, a pool, or a function that returns a "
                "CacheReading"
            )

    def collect(self) -> Iterable[Metric]:
        """Return all metrics, omitting those that a cache does not know. The values of one cache are of one moment."""
        readings = [(self._labels(engine), read()) for engine, read in self._sources.items()]
        made = [family.metric(readings) for family in FAMILIES]
        made += [durations.metric(readings) for durations in RESIDENCY]
        return [metric for metric in [*made, self._config_info(readings)] if metric.samples]

    def describe(self) -> Iterable[Metric]:
        """Return the metrics, for the registry's check of duplicate names."""
        return self.collect()

    def _labels(self, engine: str) -> Labels:
        return (("engine", engine), ("model_name", self._model_name))

    def _config_info(self, readings: list[tuple[Labels, CacheReading]]) -> Metric:
        """Return a gauge of 1 with the config as labels, under vLLM's names."""
        rows = [{**dict(labels), **config_labels(reading), **self._info} for labels, reading in readings]
        names = list(dict.fromkeys(name for row in rows for name in row))
        metric = GaugeMetricFamily("vllm:cache_config_info", "The cache's config.", labels=names)
        for row in rows:
            metric.add_metric([row.get(name, "") for name in names], 1)
        return metric


def config_labels(reading: CacheReading) -> dict[str, str]:
    """Return the config as labels, with the initial number of blocks. O(1)."""
    config, pool = reading.config, reading.pool
    if config is None:
        return {
            "block_size": str(pool.block_size),
            "num_gpu_blocks": str(pool.num_blocks),
            "enable_prefix_caching": str(pool.enable_prefix_caching),
        }
    return {
        "block_size": str(config.hash_block_size),
        "num_gpu_blocks": str(config.num_blocks),
        "num_cpu_blocks": str(config.cpu.num_blocks),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "eviction_policy": config.eviction_policy if isinstance(config.eviction_policy, str) else "own",
    }


#: Name, help text, and the function that reads it.
_Row = tuple[str, str, Callable[[PublisherStats], float]]
_GAUGES: tuple[_Row, ...] = (
    ("running", "1 while the publisher's thread runs, else 0.", lambda seen: seen.is_running),
    ("message_age_seconds", "Seconds since the last message.", lambda seen: seen.seconds_since_message),
    ("waiting", "Batches queued for the thread.", lambda seen: seen.num_waiting),
)
_COUNTERS: tuple[_Row, ...] = (
    ("messages", "Live messages sent, heartbeats included.", lambda seen: seen.num_messages),
    ("heartbeats", "Messages without events.", lambda seen: seen.num_heartbeats),
    ("bytes", "Bytes of the payloads of live messages.", lambda seen: seen.num_bytes),
    ("merged", "Batches merged into the one before because the queue was long.", lambda seen: seen.num_merged),
    ("snapshots", "Snapshots made for replays.", lambda seen: seen.num_snapshots),
    ("subscribers_cut", "Connections closed because of too many topics.", lambda seen: seen.num_cut),
    ("snapshot_bytes", "Bytes of the snapshots.", lambda seen: seen.snapshot_bytes),
)
_OUTCOMES: tuple[tuple[str, Callable[[PublisherStats], float]], ...] = (
    ("answered", lambda seen: seen.num_replays),
    ("given_up", lambda seen: seen.num_given_up),
    ("refused", lambda seen: seen.num_refused),
)


class KVEventCollector(Collector):
    """Metrics of a `blockyard.events.KVEventPublisher` for any registry of prometheus_client.

        registry.register(KVEventCollector(publisher.stats))

    A scrape is O(1).

    Args:
        read: returns the publisher's counters; called in the scraping thread.
        engine: label that distinguishes the engines of a process.
        model_name: label of the model.

    Raises:
        InvalidArgument: `read` is not a function, or a label is not a string.
    """

    def __init__(self, read: Callable[[], PublisherStats], *, engine: str = "0", model_name: str = "") -> None:
        if not callable(read):
            raise InvalidArgument(f"read is {shown(read)}; it must be a publisher's `stats`")
        self._read = read
        self._labels: Mapping[str, str] = {
            "engine": require_str("engine", engine),
            "model_name": require_str("model_name", model_name),
        }

    def collect(self) -> Iterable[Metric]:
        seen = self._read()
        names, values = list(self._labels), list(self._labels.values())
        made: list[Metric] = []
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, read in rows:
                metric = kind(f"blockyard:kv_events_{name}", text, labels=names)
                metric.add_metric(values, read(seen))
                made.append(metric)
        replays = CounterMetricFamily("blockyard:kv_events_replays", "Replays, by outcome.", labels=[*names, "outcome"])
        for outcome, read in _OUTCOMES:
            replays.add_metric([*values, outcome], read(seen))
        return [*made, replays]
