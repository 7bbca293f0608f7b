"""GET /metrics: the engine's and the requests' figures in Prometheus' text form, under a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .figures import MODEL_LABEL, EngineFigures

#: name: (what it is, how it is read). Gauges go up and down, counters only up.
Readings = dict[str, tuple[str, Callable[[EngineFigures], float]]]

GAUGES: Readings = {
    "vllm:kv_cache_usage_perc": ("Share of the KV blocks that are held, 0 to 1.", lambda seen: seen.usage),
    "vllm:num_requests_running": ("Requests in the batch.", lambda seen: seen.num_running),
    "vllm:num_requests_waiting": ("Requests in the queue.", lambda seen: seen.num_waiting),
    "blockyard:kv_blocks_used": ("Blocks held by sequences.", lambda seen: seen.stats.num_used_blocks),
    "blockyard:kv_blocks_free": ("Blocks to be had, cached ones included.", lambda seen: seen.stats.num_free_blocks),
    "blockyard:kv_blocks_cached": ("Blocks that a prompt can hit.", lambda seen: seen.stats.num_cached_blocks),
    "blockyard:kv_blocks_used_peak": ("Most blocks held at once.", lambda seen: seen.stats.peak_used_blocks),
    "blockyard:kv_slots_wasted": ("Slots held that no token fills.", lambda seen: seen.stats.num_wasted_slots),
    "blockyard:sequences_running": ("Sequences in the batch.", lambda seen: seen.stats.num_running_seqs),
}
COUNTERS: Readings = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up.", lambda seen: seen.stats.num_prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found.", lambda seen: seen.stats.num_hit_tokens),
    "vllm:num_preemptions": ("Requests set back to make room.", lambda seen: seen.num_preemptions),
    "blockyard:kv_blocks_evicted": ("Cached blocks taken for others.", lambda seen: seen.stats.num_evicted_blocks),
    "blockyard:kv_blocks_copied": ("Blocks copied on write.", lambda seen: seen.stats.num_copied_blocks),
    "blockyard:failed_steps": ("Steps in which something raised.", lambda seen: seen.num_failed_steps),
}


class EngineCollector(Collector):
    """Reads the figures of the engine's last step whenever Prometheus asks, so that nothing is counted twice."""

    def __init__(self, read: Callable[[], EngineFigures], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """All gauges and counters, of one moment. O(1)."""
        seen = self._read()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=[MODEL_LABEL])
            gauge.add_metric([self._model_name], value(seen))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[MODEL_LABEL])
            counter.add_metric([self._model_name], value(seen))
            yield counter


class MetricsPage:
    """All figures of a server as one page."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], EngineFigures], model_name: str) -> None:
        self._registry = registry
        registry.register(EngineCollector(read, model_name))

    def text(self) -> bytes:
        """The page as it is now. O(figures)."""
        return generate_latest(self._registry)
