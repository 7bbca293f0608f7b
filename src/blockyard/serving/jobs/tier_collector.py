"""This shows the tiers on the metrics page: what each brought and kept, how long it took, what failed and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from ...tiers import OffloadReading, TierReading

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
        from ...tiers import Cause  # needs the extra that the engine's tiers needed

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
                ("refused", stats.refused),
            ):
                for cause in Cause:  # from the start, so that an alert sees the first one
                    failures.add_metric([*labels, what, cause.name.lower()], counts[cause])
            circuits.add_metric([*labels, "load"], stats.is_load_open)
            circuits.add_metric([*labels, "store"], stats.is_store_open)
        yield failures
        yield circuits

    def _of_all(self, seen: OffloadReading) -> Iterator[Metric]:
        missed = CounterMetricFamily(_MISSED, "Prompt tokens that no tier brought.", labels=[*self._names, "cause"])
        for cause, count in seen.missed.items():
            missed.add_metric([*self._values, cause], count)
        yield missed
        loading = GaugeMetricFamily(_LOADING, "Requests that wait for a tier.", labels=self._names)
        loading.add_metric(self._values, seen.num_waiting)
        yield loading
