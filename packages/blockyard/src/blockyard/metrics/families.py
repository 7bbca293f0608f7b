"""Names and help texts of a cache's metrics.

Names that begin with `vllm:` are those of vLLM's dashboards; metrics that vLLM does not have begin with `blockyard:`.
Prometheus adds `_total` to the names of counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..answers import CacheStats, Histogram, Residency, RetentionEnds, TenantUse
from .reading import CacheReading, PoolCounts

#: Most tenants shown by name, in the order of the config; the others are summed.
MAX_SHARES = 100
OTHER_SHARES = "(others)"

#: Labels of a cache, the same for all its metrics: (name, value), in this order.
Labels = tuple[tuple[str, str], ...]
#: Values by the family's own label; the key is "" if it has none. None or {} if the cache does not know them.
Values = Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class Family:
    """A gauge or counter. `label`, if not "", is a label besides those of the cache."""

    name: str
    text: str
    read: Callable[[CacheReading], Values]
    label: str = ""
    is_counter: bool = False

    def metric(self, readings: list[tuple[Labels, CacheReading]]) -> Metric:
        """Return the samples of all caches. O(samples)."""
        kind = CounterMetricFamily if self.is_counter else GaugeMetricFamily
        metric = kind(self.name, self.text, labels=label_names(readings, self.label))
        for labels, reading in readings:
            for key, value in (self.read(reading) or {}).items():
                metric.add_metric([*(text for _, text in labels), *([key] if self.label else [])], value)
        return metric


@dataclass(frozen=True, slots=True)
class Durations:
    """A histogram of `Residency`."""

    name: str
    text: str
    part: Callable[[Residency], Histogram]

    def metric(self, readings: list[tuple[Labels, CacheReading]]) -> Metric:
        """Return the histogram of all caches that sample residency. O(buckets)."""
        metric = HistogramMetricFamily(self.name, self.text, labels=label_names(readings))
        for labels, reading in readings:
            if reading.residency is not None:
                durations = self.part(reading.residency)
                bounds = [*(str(bound) for bound in durations.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(durations.counts), strict=True))
                metric.add_metric([text for _, text in labels], buckets, durations.total)
        return metric


def label_names(readings: list[tuple[Labels, CacheReading]], own: str = "") -> list[str]:
    """Return the names of a family's labels: those of the caches, and its own."""
    return [*(name for name, _ in (readings[0][0] if readings else ())), *([own] if own else [])]


def _of_pool(name: str, text: str, read: Callable[[PoolCounts], float], is_counter: bool = False) -> Family:
    return Family(name, text, lambda seen: {"": read(seen.pool)}, is_counter=is_counter)


def _of_stats(name: str, text: str, read: Callable[[CacheStats], float], is_counter: bool = False) -> Family:
    """Return a family that only a cache with sequences has; a bare pool has no such numbers."""
    return Family(name, text, lambda seen: None if seen.stats is None else {"": read(seen.stats)}, "", is_counter)


def _causes(seen: CacheReading) -> Values:
    return None if seen.misses is None else seen.misses.missed


def _sources(seen: CacheReading) -> Values:
    """Return the prompt tokens by vLLM's sources. No external transfers are counted here."""
    if seen.stats is None:
        return None
    hit = seen.stats.num_hit_tokens
    return {
        "local_compute": seen.stats.num_prompt_tokens - hit,
        "local_cache_hit": hit,
        "external_kv_transfer": 0,
    }


def _hits_by(pool: str, cpu_pool: str) -> Callable[[CacheReading], Values]:
    return lambda seen: None if seen.hit_tokens is None else dict(zip((pool, cpu_pool), seen.hit_tokens, strict=True))


def _retained(seen: CacheReading) -> Values:
    if seen.stats is None or seen.config is None or not seen.config.hints.retention_blocks:
        return None
    return {"": seen.stats.num_retained_blocks}


def _ended(seen: CacheReading) -> Values:
    if seen.ended_retentions is None:
        return None
    return dict(zip(RetentionEnds.CAUSES, astuple(seen.ended_retentions), strict=True))


def _states(seen: CacheReading) -> Values:
    stats = seen.stats
    if stats is None or seen.config is None or not seen.config.has_states:
        return None
    return {
        "written": stats.num_saved_states,
        "kept": stats.num_kept_states,
        "replaced": stats.num_replaced_states,
        "refused": stats.num_refused_states,
    }


def _shares(read: Callable[[TenantUse], float]) -> Callable[[CacheReading], Values]:
    """Return a reader of a value of each tenant, the first ones by name and the others summed."""
    return lambda seen: None if seen.stats is None else _by_name(seen.stats.tenants, read)


def _by_name(uses: Sequence[TenantUse], read: Callable[[TenantUse], float]) -> dict[str, float]:
    values = {use.name: read(use) for use in uses[:MAX_SHARES]}
    if len(uses) > MAX_SHARES:
        values[OTHER_SHARES] = values.get(OTHER_SHARES, 0) + sum(read(use) for use in uses[MAX_SHARES:])
    return values


#: Gauges of a tenant: name, help text, and the function that reads it.
SHARES: tuple[tuple[str, str, Callable[[TenantUse], float]], ...] = (
    ("blockyard:share_blocks", "A tenant's share.", lambda use: use.share),
    ("blockyard:share_blocks_held", "Blocks that a tenant holds.", lambda use: use.num_held),
    ("blockyard:share_blocks_idle", "Idle blocks of a tenant.", lambda use: use.num_idle),
    ("blockyard:share_blocks_retained", "Retained blocks of a tenant.", lambda use: use.num_retained),
    ("blockyard:share_blocks_floor", "Blocks guaranteed to a tenant.", lambda use: use.min_blocks),
)


def share_metrics(labels: Mapping[str, str], uses: Sequence[TenantUse]) -> Iterator[Metric]:
    """Yield the tenants' gauges of several pools that are shown as one. O(tenants)."""
    for name, text, read in SHARES:
        metric = GaugeMetricFamily(name, text, labels=[*labels, "tenant"])
        for tenant, value in _by_name(uses, read).items():
            metric.add_metric([*labels.values(), tenant], value)
        yield metric


def _block_bytes(seen: CacheReading) -> Values:
    return {"": seen.stats.block_bytes} if seen.stats is not None and seen.stats.block_bytes else None


FAMILIES: tuple[Family, ...] = (
    _of_pool("vllm:kv_cache_usage_perc", "Share of the KV blocks that are held, 0 to 1.", lambda pool: pool.usage),
    _of_stats(
        "vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda stats: stats.num_prompt_tokens, is_counter=True
    ),
    _of_stats("vllm:prefix_cache_hits", "Prompt tokens found.", lambda stats: stats.num_hit_tokens, is_counter=True),
    Family(
        "vllm:num_preemptions",
        "Sequences preempted to make room.",
        lambda seen: None if seen.num_preemptions is None else {"": seen.num_preemptions},
        is_counter=True,
    ),
    Family("vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", _sources, "source", True),
    Family(
        "vllm:prompt_tokens_cached_by_source",
        "Prompt tokens found, by the memory they lay in.",
        _hits_by("device", "host"),
        "source",
        True,
    ),
    Family("blockyard:kv_blocks", "Blocks by state.", lambda seen: asdict(seen.blocks), "state"),
    Family(
        "blockyard:cpu_kv_blocks",
        "Blocks of the CPU pool by state.",
        lambda seen: None if seen.cpu_blocks is None else asdict(seen.cpu_blocks),
        "state",
    ),
    _of_pool("blockyard:kv_blocks_used", "Blocks that are held.", lambda pool: pool.num_used),
    _of_pool("blockyard:kv_blocks_free", "Free blocks, idle ones included.", lambda pool: pool.num_free),
    _of_pool("blockyard:kv_blocks_cached", "Blocks that can be hit.", lambda pool: pool.num_cached),
    _of_pool("blockyard:kv_blocks_used_peak", "Most blocks held at once.", lambda pool: pool.peak_used),
    Family("blockyard:kv_blocks_retained", "Blocks that `retain` protects.", _retained),
    Family("blockyard:kv_retentions_ended", "Blocks whose retention has ended, by cause.", _ended, "cause", True),
    Family("blockyard:kv_states", "States of hybrid models, by event.", _states, "event", True),
    *(Family(name, text, _shares(read), "tenant") for name, text, read in SHARES),
    Family("blockyard:kv_block_bytes", "Bytes of a block.", _block_bytes),
    Family(
        "blockyard:share_blocks_evicted",
        "Cached blocks of a tenant that were evicted.",
        _shares(lambda use: use.num_evicted_blocks),
        "tenant",
        True,
    ),
    _of_stats("blockyard:kv_slots_wasted", "Slots held without a token.", lambda stats: stats.num_wasted_slots),
    _of_stats("blockyard:sequences_running", "Sequences with blocks.", lambda stats: stats.num_running_seqs),
    _of_pool("blockyard:kv_blocks_allocated", "Blocks taken.", lambda pool: pool.num_allocated, is_counter=True),
    _of_pool("blockyard:kv_blocks_evicted", "Cached blocks evicted.", lambda pool: pool.num_evicted, is_counter=True),
    _of_stats(
        "blockyard:kv_blocks_copied", "Blocks copied on write.", lambda stats: stats.num_copied_blocks, is_counter=True
    ),
    Family("blockyard:hit_tokens", "Prompt tokens found, by medium.", _hits_by("gpu", "cpu"), "medium", True),
    Family("blockyard:missed_tokens", "Prompt tokens not found, by cause.", _causes, "cause", True),
    _of_stats(
        "blockyard:resumed_tokens",
        "Prompt tokens of preempted sequences that were resumed.",
        lambda stats: stats.num_resumed_tokens,
        is_counter=True,
    ),
    _of_stats(
        "blockyard:resumed_hit_tokens",
        "Resumed prompt tokens found.",
        lambda stats: stats.num_resumed_hit_tokens,
        is_counter=True,
    ),
)
#: Histograms of the blocks that `residency_sample` selects.
RESIDENCY: tuple[Durations, ...] = (
    Durations("vllm:kv_block_lifetime_seconds", "From taking a block to evicting it.", lambda seen: seen.lifetime),
    Durations(
        "vllm:kv_block_idle_before_evict_seconds",
        "From its last use to evicting it: its age at eviction.",
        lambda seen: seen.idle_before_evict,
    ),
    Durations(
        "vllm:kv_block_reuse_gap_seconds", "Between two uses of a block: its age at a hit.", lambda seen: seen.reuse_gap
    ),
)
