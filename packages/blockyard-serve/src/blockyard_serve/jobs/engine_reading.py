"""Metrics of an engine between two steps: read in the engine thread, exported from any other."""

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
    """State of an engine between two steps.

    Attributes:
        num_deferred: waiting requests whose prefix is being computed by a running one; they do not lack blocks.
        num_drafts: drafts that speculation proposed.
        num_drafted_tokens: tokens of these drafts.
        num_accepted_tokens: drafted tokens that the model confirmed.
        longest_wait: seconds for which a request waits that no step has computed yet; 0 if none waits.
        num_missing_tokens: tokens that the waiting requests would compute now; None if they start by arrival.
        num_lane: requests that started because they had waited longest.
        offload: statistics of its tiers, if it has any.
    """

    cache: CacheReading
    num_running: int
    num_waiting: int
    num_deferred: int
    num_drafts: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_failed_steps: int
    longest_wait: float = 0.0
    num_missing_tokens: int | None = None
    num_lane: int = 0
    offload: OffloadReading | None = None

    @classmethod
    def of(cls, engine: Engine, num_failed_steps: int, longest_wait: float = 0.0) -> EngineReading:
        """Read the engine. O(num_blocks + requests), so read on demand and not after every step."""
        order = engine.admission
        return cls(
            cache=CacheReading.of(engine.cache, engine.num_preemptions, engine.num_cpu_hit_tokens),
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_deferred=engine.num_deferred,
            num_drafts=engine.num_drafts,
            num_drafted_tokens=engine.num_drafted_tokens,
            num_accepted_tokens=engine.num_accepted_tokens,
            num_failed_steps=num_failed_steps,
            longest_wait=longest_wait,
            num_missing_tokens=None if order is None else order.num_missing_tokens(),
            num_lane=0 if order is None else order.rule.num_lane,
            offload=None if engine.offload is None else engine.offload.read(),
        )


#: Help text and value of each metric.
Readings = dict[str, tuple[str, Callable[[EngineReading], float]]]

GAUGES: Readings = {
    "vllm:num_requests_running": ("Requests in the batch.", lambda seen: seen.num_running),
    "vllm:num_requests_waiting": ("Requests in the queue.", lambda seen: seen.num_waiting),
    "blockyard:longest_wait_seconds": (
        "Longest wait of a request in the queue that has not started.",
        lambda seen: seen.longest_wait,
    ),
}
COUNTERS: Readings = {
    "vllm:spec_decode_num_drafts": ("Drafts that speculation proposed.", lambda seen: seen.num_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Tokens of drafts.", lambda seen: seen.num_drafted_tokens),
    "vllm:spec_decode_num_accepted_tokens": (
        "Draft tokens that the model confirmed.",
        lambda seen: seen.num_accepted_tokens,
    ),
    "blockyard:failed_steps": ("Steps in which something raised.", lambda seen: seen.num_failed_steps),
}
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
MISSING_TOKENS = "blockyard:waiting_missing_tokens"
LANE_ADMISSIONS = "blockyard:lane_admissions"
SLEEP_STATE = "vllm:engine_sleep_state"


class EngineCollector(Collector):
    """Collector of an engine's metrics.

    Args:
        read: returns the latest reading.
        labels: labels of every metric.
    """

    def __init__(self, read: Callable[[], EngineReading], labels: dict[str, str]) -> None:
        self._read = read
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of one reading. O(1)."""
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
        if seen.num_missing_tokens is not None:
            missing = GaugeMetricFamily(
                MISSING_TOKENS, "Tokens that requests in the queue would compute.", labels=names
            )
            missing.add_metric(texts, seen.num_missing_tokens)
            yield missing
            lane = CounterMetricFamily(LANE_ADMISSIONS, "Requests that started as the longest-waiting.", labels=names)
            lane.add_metric(texts, seen.num_lane)
            yield lane
        # vLLM's dashboards ask for it; this engine never sleeps.
        states = GaugeMetricFamily(SLEEP_STATE, "Whether the engine is awake.", labels=[*names, "sleep_state"])
        for state in ("awake", "weights_offloaded", "discard_all"):
            states.add_metric([*texts, state], state == "awake")
        yield states
