"""The state of an engine between two steps, made in its thread and read in any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blockyard.metrics import CacheReading
from blockyard_engine import Engine

if TYPE_CHECKING:
    from blockyard_tiers import OffloadReading


@dataclass(frozen=True, slots=True)
class EngineReading:
    """What an engine says of its cache and its queue.

    num_running, num_waiting: requests; num_deferred: those of the waiting ones that wait for a running one to compute
    the beginning of their prompt, and not for room. num_failed_steps: steps in which something raised. offload: its
    tiers; None without any.
    """

    cache: CacheReading
    num_running: int
    num_waiting: int
    num_deferred: int
    num_drafts: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_failed_steps: int
    offload: OffloadReading | None = None

    @classmethod
    def of(cls, engine: Engine, num_failed_steps: int) -> EngineReading:
        """Read the engine. O(num_blocks + requests), so it is made when it is asked for and not after every step."""
        return cls(
            cache=CacheReading.of(engine.cache, engine.num_preemptions, engine.num_cpu_hit_tokens),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_deferred=engine.num_deferred,
            num_drafts=engine.num_drafts,
            num_drafted_tokens=engine.num_drafted_tokens,
            num_accepted_tokens=engine.num_accepted_tokens,
            num_failed_steps=num_failed_steps,
            offload=None if engine.offload is None else engine.offload.read(),
        )


#: name: (what it is, how it is read). Gauges go up and down, counters only up.
Readings = dict[str, tuple[str, Callable[[EngineReading], float]]]

GAUGES: Readings = {
    "vllm:num_requests_running": ("Requests in the batch.", lambda seen: seen.num_running),
    "vllm:num_requests_waiting": ("Requests in the queue.", lambda seen: seen.num_waiting),
}
COUNTERS: Readings = {
    "vllm:spec_decode_num_drafts": ("Drafts that speculation proposed.", lambda seen: seen.num_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Tokens of them.", lambda seen: seen.num_drafted_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Those the model confirmed.", lambda seen: seen.num_accepted_tokens),
    "blockyard:failed_steps": ("Steps in which something raised.", lambda seen: seen.num_failed_steps),
}
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
SLEEP_STATE = "vllm:engine_sleep_state"


class EngineCollector(Collector):
    """The engine's part of the page. read: gives the latest reading. labels: by name, the same for all metrics."""

    def __init__(self, read: Callable[[], EngineReading], labels: dict[str, str]) -> None:
        self._read = read
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield all gauges and counters, of one moment. O(1)."""
        seen, names, texts = self._read(), list(self._labels), list(self._labels.values())
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(texts, value(seen))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(texts, value(seen))
            yield counter
        waiting = GaugeMetricFamily(WAITING_BY_REASON, "Requests in the queue, by reason.", labels=[*names, "reason"])
        waiting.add_metric([*texts, "capacity"], seen.num_waiting - seen.num_deferred)
        waiting.add_metric([*texts, "deferred"], seen.num_deferred)
        yield waiting
        yield self._awake()

    def _awake(self) -> Metric:
        """Return what vLLM's boards ask for; an engine here never sleeps."""
        states = GaugeMetricFamily(SLEEP_STATE, "Whether the engine is awake.", labels=[*self._labels, "sleep_state"])
        for state in ("awake", "weights_offloaded", "discard_all"):
            states.add_metric([*self._labels.values(), state], state == "awake")
        return states
