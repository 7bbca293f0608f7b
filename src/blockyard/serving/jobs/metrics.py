"""What Prometheus is told: figures of the engine after a step, and of the requests as they end, under GET /metrics.

Names that begin with `vllm:` are those that vLLM's dashboards graph; what vLLM does not count is `blockyard:`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...answers import CacheStats, MissCauses, Residency
from ...answers import Histogram as Durations
from ...engine import Engine, GenerationResult
from .job import Job

#: By which dashboards choose among servers.
MODEL_LABEL = "model_name"
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_NEXT_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_REQUEST_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine's state between two steps, made in its thread and read in any other.

    usage: share of the pool that is held. num_failed_steps: steps in which something raised. residency, misses: None
    where the cache does not follow them (`residency_sample`, `track_misses`).
    """

    stats: CacheStats
    usage: float
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_failed_steps: int
    residency: Residency | None = None
    misses: MissCauses | None = None

    @classmethod
    def of(cls, engine: Engine, num_failed_steps: int) -> EngineFigures:
        """Read the engine. O(running sequences)."""
        cache = engine.cache
        return cls(
            stats=cache.stats(),
            usage=cache.usage,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_preemptions=engine.num_preemptions,
            num_failed_steps=num_failed_steps,
            residency=cache.residency() if cache.config.residency_sample else None,
            misses=cache.miss_totals() if cache.config.track_misses else None,
        )


class RequestFigures:
    """Counters and latencies of requests, in a registry of their own. The engine thread counts, any thread reads."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._model_name = model_name
        counter, histogram = self._counter, self._histogram
        self._ended = counter("vllm:request_success", "Completions that came to their end.", "finished_reason")
        self._refused = counter("blockyard:requests_refused", "Requests that were not taken.", "reason")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that came to their end.")
        self.cached_tokens = counter("vllm:prompt_tokens_cached", "Those of them that the cache had.")
        self.generated_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self.next_token = histogram(
            "vllm:inter_token_latency_seconds", "Between a completion's tokens.", _NEXT_TOKEN_SECONDS
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST_SECONDS)
        self.cancelled = counter("blockyard:requests_cancelled", "Requests whose client went away or took too long.")
        self.failed = counter("blockyard:requests_failed", "Requests that ended with an error behind the queue.")

    def count_tokens(self, job: Job, index: int, number: int, now: float) -> None:
        """What a step gave completion `index` of a job: `number` tokens. O(number).

        Tokens that come together share the time since the one before, so the intervals of a completion are one fewer
        than its tokens and add up to the time from its first to its last.
        """
        self.generated_tokens.inc(number)
        if job.first_token_at is None:
            job.first_token_at = now
            self.first_token.observe(now - job.arrived_at)
        before = job.last_token_at.get(index)
        num_intervals = number if before is not None else number - 1
        for _ in range(num_intervals):
            self.next_token.observe((now - (now if before is None else before)) / num_intervals)
        job.last_token_at[index] = now

    def count_end(self, job: Job, result: GenerationResult, now: float) -> None:
        """A job that came to its end. O(completions)."""
        self.whole.observe(now - job.arrived_at)
        self.prompt_tokens.inc(result.num_prompt_tokens)
        self.cached_tokens.inc(result.num_cached_tokens)
        for completion in result.completions:
            self._ended.labels(self._model_name, str(completion.finish_reason)).inc()

    def count_refusal(self, reason: str) -> None:
        """A request that was not taken: "queue_full" or "not_serving". O(1)."""
        self._refused.labels(self._model_name, reason).inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(name, text, [MODEL_LABEL, *labels], registry=self.registry)
        return made if labels else made.labels(self._model_name)

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, [MODEL_LABEL], registry=self.registry, buckets=bounds).labels(self._model_name)


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
    "vllm:num_preemptions": ("Sequences preempted to make room.", lambda seen: seen.num_preemptions),
    "blockyard:kv_blocks_evicted": ("Cached blocks taken for others.", lambda seen: seen.stats.num_evicted_blocks),
    "blockyard:kv_blocks_copied": ("Blocks copied on write.", lambda seen: seen.stats.num_copied_blocks),
    "blockyard:failed_steps": ("Steps in which something raised.", lambda seen: seen.num_failed_steps),
}
#: Of the blocks that `residency_sample` follows.
RESIDENCY: dict[str, tuple[str, Callable[[Residency], Durations]]] = {
    "vllm:kv_block_lifetime_seconds": ("From taking a block to evicting it.", lambda seen: seen.lifetime),
    "vllm:kv_block_idle_before_evict_seconds": (
        "From its last use to evicting it.",
        lambda seen: seen.idle_before_evict,
    ),
    "vllm:kv_block_reuse_gap_seconds": ("Between two uses of a block.", lambda seen: seen.reuse_gap),
}
MISSED_TOKENS = "blockyard:missed_tokens"
#: Labels of `MISSED_TOKENS`, and what they count.
CAUSES: dict[str, Callable[[MissCauses], int]] = {
    "tail": lambda seen: seen.num_tail,
    "never_seen": lambda seen: seen.num_never_seen,
    "evicted": lambda seen: seen.num_evicted,
    "other_keys": lambda seen: seen.num_other_keys,
    "recomputed": lambda seen: seen.num_recomputed,
}


class EngineCollector(Collector):
    """Reads the figures of the engine's last step whenever Prometheus asks, so that nothing is counted twice."""

    def __init__(self, read: Callable[[], EngineFigures], model_name: str) -> None:
        self._read = read
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        """All gauges, counters and histograms, of one moment. O(1)."""
        seen = self._read()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=[MODEL_LABEL])
            gauge.add_metric([self._model_name], value(seen))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=[MODEL_LABEL])
            counter.add_metric([self._model_name], value(seen))
            yield counter
        if seen.residency is not None:
            yield from self._durations(seen.residency)
        if seen.misses is not None:
            yield self._missed(seen.misses)

    def _durations(self, residency: Residency) -> Iterable[Metric]:
        for name, (text, part) in RESIDENCY.items():
            durations = part(residency)
            bounds = [*(str(bound) for bound in durations.bounds), "+Inf"]
            family = HistogramMetricFamily(name, text, labels=[MODEL_LABEL])
            buckets = list(zip(bounds, accumulate(durations.counts), strict=True))
            family.add_metric([self._model_name], buckets, durations.total)
            yield family

    def _missed(self, misses: MissCauses) -> Metric:
        counter = CounterMetricFamily(
            MISSED_TOKENS, "Prompt tokens not found, by cause.", labels=[MODEL_LABEL, "cause"]
        )
        for cause, number in CAUSES.items():
            counter.add_metric([self._model_name, cause], number(misses))
        return counter


class MetricsPage:
    """All figures of a server as one page."""

    def __init__(self, registry: CollectorRegistry, read: Callable[[], EngineFigures], model_name: str) -> None:
        self._registry = registry
        registry.register(EngineCollector(read, model_name))

    def text(self) -> bytes:
        """The page as it is now. O(figures)."""
        return generate_latest(self._registry)
