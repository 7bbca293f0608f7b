"""Metrics of a fleet: trust, age and load of replicas, claimed and true hits."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from blockyard.answers import TenantUse
from blockyard.metrics import share_metrics
from blockyard.routing import Choice, ReplicaStatus
from blockyard_engine import GenerationResult
from blockyard_engine.parallel import add_tenant_uses

from ..live.frames import tenant_lines
from .shared import SharedFleet


@dataclass(slots=True)
class Claims:
    """Claimed and true hits of requests that one replica completed.

    Attributes:
        exact: requests whose claim was right.
        claimed: tokens that the router claimed.
        true: tokens that the engine found.
        over: tokens that were claimed but not found.
        under: tokens that were found but not claimed.
    """

    requests: int = 0
    exact: int = 0
    claimed: int = 0
    true: int = 0
    over: int = 0
    under: int = 0


#: Seconds for which the tenants' sums are reused, and that a page waits for new ones.
SUMS_SECONDS = 1.0
#: Fields of a tenant in GET /fleet, in blocks of all replicas.
TENANT_FIELDS = ("name", "held", "idle", "retained", "floor", "share")
#: Number of recent choices to show.
MAX_CHOICES = 32


class FleetMetrics:
    """Counts hits and lost replicas. Only the event loop's thread counts."""

    def __init__(self) -> None:
        self.claims: dict[str, Claims] = {}
        self.num_lost: Counter[str] = Counter()
        #: Recent choices with the names of their requests, oldest first; the router's thread appends.
        self.choices: deque[tuple[str, Choice]] = deque(maxlen=MAX_CHOICES)
        self.num_resumed = 0
        self.num_tokens_resumed = 0
        self.num_handed_over = 0

    def count_claim(self, replica: str, claimed: int, result: GenerationResult) -> None:
        """Compare the claimed hit of a request with its true one. A negative claim is unknown. O(1)."""
        if claimed < 0:
            return
        seen, true = self.claims.setdefault(replica, Claims()), result.num_cached_tokens
        seen.requests += 1
        seen.exact += claimed == true
        seen.claimed += claimed
        seen.true += true
        seen.over += max(claimed - true, 0)
        seen.under += max(true - claimed, 0)

    def count_loss(self, replica: str) -> None:
        """Count a request that lost its replica. O(1)."""
        self.num_lost[replica] += 1

    def count_resume(self, num_tokens: int) -> None:
        """Count a request that continues on another replica after `num_tokens` tokens. O(1)."""
        self.num_resumed += 1
        self.num_tokens_resumed += num_tokens

    def shown_choices(self) -> list[dict[str, Any]]:
        """Return the last choices, newest first, with the facts about each candidate. O(choices * replicas)."""
        return [
            {
                "request": name,
                "replica": choice.replica,
                "claimed": choice.num_tokens,
                "problem": choice.problem,
                # The cost is infinite if the candidate is only a last resort; JSON has no infinity.
                "why": [{**why._asdict(), "cost": why.cost if math.isfinite(why.cost) else None} for why in choice.why],
            }
            for name, choice in reversed(list(self.choices))
        ]

    def merge_removed(self, present: Iterable[str]) -> None:
        """Merge the claims of replicas that no longer exist, so that the number of labels is bounded."""
        for name in [name for name in self.claims if name not in {*present, GONE}]:
            old, new = self.claims.pop(name), self.claims.setdefault(GONE, Claims())
            for each, number in asdict(old).items():
                setattr(new, each, getattr(new, each) + number)


class TenantSums(Collector):
    """Sums the tenants' use of all replicas' pools.

    Args:
        ask: returns the uses, or an error, of each replica; may take long.
        labels: labels of the metrics.
    """

    def __init__(self, ask: Callable[[], Awaitable[list[Any]]], labels: dict[str, str]) -> None:
        self._ask = ask
        self._labels = labels
        self._asking: asyncio.Future[list[Any]] | None = None
        self._asked_at = -math.inf
        self.uses: list[TenantUse] = []

    async def read(self) -> list[TenantUse]:
        """Return the sums, at most a second old; the previous ones if the replicas take longer than a second."""
        if self._asking is None and time.monotonic() - self._asked_at >= SUMS_SECONDS:
            self._asking, self._asked_at = asyncio.ensure_future(self._ask()), time.monotonic()
            self._asking.add_done_callback(self._take)
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=SUMS_SECONDS)
        return self.uses

    def _take(self, results: asyncio.Future[list[Any]]) -> None:
        self._asking = None
        if not results.cancelled() and results.exception() is None:  # one dead replica fails the whole call
            uses = [each for each in results.result() if isinstance(each, tuple)]
            self.uses = [reduce(add_tenant_uses, each) for each in zip(*uses, strict=True)]

    def collect(self) -> Iterable[Metric]:
        """Return the last sums. O(tenants)."""
        return share_metrics(self._labels, self.uses)


#: Label of all removed replicas together.
GONE = "gone"

_GAUGES: dict[str, tuple[str, Any]] = {
    "blockyard:fleet_replica_believed": ("1 if the replica is trusted.", lambda seen: seen.is_believed),
    "blockyard:fleet_replica_silence_seconds": ("Seconds since its last message.", lambda seen: seen.silence),
    "blockyard:fleet_replica_requests": ("Requests in flight.", lambda seen: seen.requests),
    "blockyard:fleet_replica_uncached_tokens": (
        "Prompt tokens in flight, still to be computed.",
        lambda seen: seen.uncached,
    ),
    "blockyard:fleet_replica_held_tokens": ("Tokens of prompts and answers in flight.", lambda seen: seen.held),
}
_CLAIMS = {
    "claimed_hit_tokens": ("Prompt tokens that the router claimed as hits.", "claimed"),
    "true_hit_tokens": ("Prompt tokens that the engine hit.", "true"),
    "overclaimed_hit_tokens": ("Prompt tokens that were claimed but not hit.", "over"),
    "underclaimed_hit_tokens": ("Prompt tokens that were hit but not claimed.", "under"),
    "claims": ("Requests with a claim, including claims of 0.", "requests"),
    "exact_claims": ("Requests whose claim was exact.", "exact"),
}


class FleetCollector(Collector):
    """Collector of a fleet's metrics."""

    def __init__(self, fleet: SharedFleet, metrics: FleetMetrics, labels: dict[str, str]) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of one moment. O(replicas)."""
        replicas = self._fleet.status()
        self._metrics.merge_removed(each.name for each in replicas)
        names, texts = [*self._labels, "replica"], [*self._labels.values()]
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            for each in replicas:
                number = value(each)
                if number is not None:
                    gauge.add_metric([*texts, each.name], number)
            yield gauge
        yield self._trusts(replicas)
        for name, (text, field) in _CLAIMS.items():
            counter = CounterMetricFamily(f"blockyard:fleet_{name}", text, labels=names)
            for replica, claims in self._metrics.claims.items():
                counter.add_metric([*texts, replica], getattr(claims, field))
            yield counter
        for name, text, number in self._totals():
            total = CounterMetricFamily(f"blockyard:fleet_{name}", text, labels=list(self._labels))
            total.add_metric(texts, number)
            yield total

    def _totals(self) -> list[tuple[str, str, int]]:
        metrics = self._metrics
        return [
            ("lost_attempts", "Requests that lost their replica.", metrics.num_lost.total()),
            ("resumed_requests", "Requests that continued on another replica.", metrics.num_resumed),
            ("resumed_tokens", "Tokens that these requests had received before.", metrics.num_tokens_resumed),
        ]

    def _trusts(self, replicas: list[ReplicaStatus]) -> Metric:
        trusts = GaugeMetricFamily(
            "blockyard:fleet_replica_trust", "1 for the current trust.", labels=[*self._labels, "replica", "trust"]
        )
        for each in replicas:
            trusts.add_metric([*self._labels.values(), each.name, each.trust], 1)
        return trusts


class FleetPage:
    """Renders GET /metrics of a fleet (a `Page`).

    Args:
        collectors: collectors of the metrics.
        tenants: use of the pools by tenant, if there are tenants.
    """

    def __init__(self, collectors: Iterable[Collector], tenants: TenantSums | None = None) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._tenants = tenants
        for each in [*collectors, *([] if tenants is None else [tenants])]:
            self._registry.register(each)
        ProcessCollector(registry=self._registry)

    async def text(self) -> bytes:
        if self._tenants is not None:
            await self._tenants.read()
        return generate_latest(self._registry)


_TOTALS = ("lost_attempts", "resumed_requests", "resumed_tokens", "handed_over_requests")
_LOADS = ("requests", "uncached", "held", "lost")


def fleet_state(
    fleet: SharedFleet, metrics: FleetMetrics, model_name: str, tenants: Sequence[TenantUse] = ()
) -> dict[str, Any]:
    """Return the response of GET /fleet. O(replicas * choices + tenants log tenants)."""
    return {
        "object": "fleet",
        "model": model_name,
        "replicas": [
            {**each._asdict(), "lost": metrics.num_lost[each.name], "prefill": each.name in fleet.prefills}
            for each in fleet.status()
        ],
        "tenants": [dict(zip(TENANT_FIELDS, line, strict=True)) for line in tenant_lines(tenants)],
        "claims": {name: asdict(claims) for name, claims in metrics.claims.items()},
        "lost_attempts": metrics.num_lost.total(),
        "resumed_requests": metrics.num_resumed,
        "resumed_tokens": metrics.num_tokens_resumed,
        "handed_over_requests": metrics.num_handed_over,
        "choices": metrics.shown_choices(),
    }


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of several ingresses: sum loads and claims, and take the lowest trust."""
    replicas: dict[str, dict[str, Any]] = {}
    claims: dict[str, Counter[str]] = {}
    for state in states:
        for each in state["replicas"]:
            before = replicas.get(each["name"])
            replicas[each["name"]] = each if before is None else _added(before, each)
        for name, counts in state["claims"].items():
            claims.setdefault(name, Counter()).update(counts)
    return {
        **states[0],
        "ingresses": len(states),
        "replicas": list(replicas.values()),
        "claims": {name: dict(counts) for name, counts in claims.items()},
        **{name: sum(state[name] for state in states) for name in _TOTALS},
        "choices": [choice for state in states for choice in state["choices"][: MAX_CHOICES // len(states)]],
    }


def _added(before: dict[str, Any], each: dict[str, Any]) -> dict[str, Any]:
    """Merge the states of one replica in two ingresses."""
    silences = [silence for silence in (before["silence"], each["silence"]) if silence is not None]
    return {
        **before,
        "is_believed": before["is_believed"] and each["is_believed"],
        "trust": each["trust"] if before["trust"] == "live" else before["trust"],
        "silence": max(silences, default=None),
        **{name: before[name] + each[name] for name in _LOADS},
    }
