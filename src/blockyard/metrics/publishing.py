"""What a publisher of KV events tells Prometheus: whether it goes on, what it sent, and who asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..arguments import require_str, shown
from ..errors import InvalidArgument
from ..kv_events import PublisherStats

#: Name, text, and how it is read.
_Row = tuple[str, str, Callable[[PublisherStats], float]]
_GAUGES: tuple[_Row, ...] = (
    ("running", "1 while the thread that publishes runs, else 0.", lambda seen: seen.is_running),
    ("message_age_seconds", "Seconds since the last message.", lambda seen: seen.seconds_since_message),
    ("waiting", "Hand-overs that wait for the thread.", lambda seen: seen.num_waiting),
)
_COUNTERS: tuple[_Row, ...] = (
    ("messages", "Messages sent live, heartbeats among them.", lambda seen: seen.num_messages),
    ("heartbeats", "Messages that said nothing.", lambda seen: seen.num_heartbeats),
    ("bytes", "Bytes of the payloads of live messages.", lambda seen: seen.num_bytes),
    ("merged", "Hand-overs merged with the one before, because many waited.", lambda seen: seen.num_merged),
    ("snapshots", "Snapshots made for replays.", lambda seen: seen.num_snapshots),
    ("subscribers_cut", "Connections cut off for their many topics.", lambda seen: seen.num_cut),
    ("snapshot_bytes", "Their bytes.", lambda seen: seen.snapshot_bytes),
)
_OUTCOMES: tuple[tuple[str, Callable[[PublisherStats], float]], ...] = (
    ("answered", lambda seen: seen.num_replays),
    ("given_up", lambda seen: seen.num_given_up),
    ("refused", lambda seen: seen.num_refused),
)


class KVEventCollector(Collector):
    """Metrics of a `blockyard.events.KVEventPublisher` for any registry of prometheus_client.

        registry.register(KVEventCollector(publisher.stats))

    read: returns the publisher's counts, from any thread. engine, model_name: labels, as `CacheCollector` has them.
    A scrape is O(1). Raises `InvalidArgument` for what is no function, and for text that is none.
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
        """All metrics, from one moment."""
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
