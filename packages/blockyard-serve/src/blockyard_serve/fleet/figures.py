"""A fleet says here what it knows of itself: trust, age and load of replicas, hits claimed and hits come true."""

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
    """Counts, of requests that one replica brought to their end, hits that the router claimed and that came true.

    exact: requests of which both are equal. over, under: tokens that were claimed and not there, and the other way.
    """

    requests: int = 0
    exact: int = 0
    claimed: int = 0
    true: int = 0
    over: int = 0
    under: int = 0


#: Seconds for which what tenants have is not asked again, and that a page waits for it.
SUMS_SECONDS = 1.0
#: What GET /fleet says of a tenant, in blocks of all replicas.
TENANT_FIELDS = ("name", "held", "idle", "retained", "floor", "share")
#: Choices that are kept, to be shown with their why.
MAX_CHOICES = 32


class FleetFigures:
    """Counts what becomes of claims and of lost replicas; one thread counts, that of the loop."""

    def __init__(self) -> None:
        self.claims: dict[str, Claims] = {}
        self.num_lost: Counter[str] = Counter()
        #: The last choices, oldest first, with the name of their request; the router's thread adds to them.
        self.choices: deque[tuple[str, Choice]] = deque(maxlen=MAX_CHOICES)
        self.num_resumed = 0
        self.num_tokens_resumed = 0
        self.num_handed_over = 0

    def claim(self, replica: str, claimed: int, result: GenerationResult) -> None:
        """Compare what was claimed of a request with what the cache had. Below 0 nothing was claimed. O(1)."""
        if claimed < 0:
            return
        seen, true = self.claims.setdefault(replica, Claims()), result.num_cached_tokens
        seen.requests += 1
        seen.exact += claimed == true
        seen.claimed += claimed
        seen.true += true
        seen.over += max(claimed - true, 0)
        seen.under += max(true - claimed, 0)

    def lost(self, replica: str) -> None:
        """Count a request that lost its replica. O(1)."""
        self.num_lost[replica] += 1

    def resumed(self, num_tokens: int) -> None:
        """Count one that goes on elsewhere, behind `num_tokens` tokens. O(1)."""
        self.num_resumed += 1
        self.num_tokens_resumed += num_tokens

    def shown_choices(self) -> list[dict[str, Any]]:
        """Return the last choices, the newest first, with what was known of each candidate. O(choices * replicas)."""
        return [
            {
                "request": name,
                "replica": choice.replica,
                "claimed": choice.num_tokens,
                "problem": choice.problem,
                # JSON has no infinity: the cost of one that is taken only where no other may.
                "why": [{**why._asdict(), "cost": finite(why.cost)} for why in choice.why],
            }
            for name, choice in reversed(list(self.choices))
        ]

    def forget(self, present: Iterable[str]) -> None:
        """Add what was counted of replicas that are gone to one name, so that labels do not grow."""
        for name in [name for name in self.claims if name not in {*present, GONE}]:
            old, new = self.claims.pop(name), self.claims.setdefault(GONE, Claims())
            for each, number in asdict(old).items():
                setattr(new, each, getattr(new, each) + number)


def finite(number: float) -> float | None:
    """Return a number that JSON has; None for others."""
    return number if math.isfinite(number) else None


class TenantSums(Collector):
    """Adds up what tenants have of all replicas. ask: says it of each, or an error; it may take long.

    labels: of its metrics.
    """

    def __init__(self, ask: Callable[[], Awaitable[list[Any]]], labels: dict[str, str]) -> None:
        self._ask = ask
        self._labels = labels
        self._asking: asyncio.Future[list[Any]] | None = None
        self._asked_at = -math.inf
        #: What was told last.
        self.uses: list[TenantUse] = []

    async def read(self) -> list[TenantUse]:
        """Return the sums as they are now, or within a second were; after a second without an answer the last ones."""
        if self._asking is None and time.monotonic() - self._asked_at >= SUMS_SECONDS:
            self._asking, self._asked_at = asyncio.ensure_future(self._ask()), time.monotonic()
            self._asking.add_done_callback(self._take)
        if self._asking is not None:
            await asyncio.wait([self._asking], timeout=SUMS_SECONDS)
        return self.uses

    def _take(self, told: asyncio.Future[list[Any]]) -> None:
        self._asking = None
        if not told.cancelled() and told.exception() is None:  # a replica that has just died ends all answers
            uses = [each for each in told.result() if isinstance(each, tuple)]
            self.uses = [reduce(add_tenant_uses, each) for each in zip(*uses, strict=True)]

    def collect(self) -> Iterable[Metric]:
        """Return what was told last. O(tenants)."""
        return share_metrics(self._labels, self.uses)


#: The label under which replicas that are gone are counted together.
GONE = "gone"

_GAUGES: dict[str, tuple[str, Any]] = {
    "blockyard:fleet_replica_believed": ("Whether what it says counts.", lambda seen: seen.is_believed),
    "blockyard:fleet_replica_silence_seconds": ("Since it was heard.", lambda seen: seen.silence),
    "blockyard:fleet_replica_requests": ("Requests booked there.", lambda seen: seen.requests),
    "blockyard:fleet_replica_uncached_tokens": ("Prompt tokens booked to be computed.", lambda seen: seen.uncached),
    "blockyard:fleet_replica_held_tokens": ("Tokens of prompts and answers booked.", lambda seen: seen.held),
}
_CLAIMS = {
    "claimed_hit_tokens": ("Hits that the router claimed.", "claimed"),
    "true_hit_tokens": ("Hits that came true.", "true"),
    "overclaimed_hit_tokens": ("Hits that were claimed and not there.", "over"),
    "underclaimed_hit_tokens": ("Hits that were there and not claimed.", "under"),
    "claims": ("Requests of which hits were claimed, none included.", "requests"),
    "exact_claims": ("Those of which the claim was right to the token.", "exact"),
}


class FleetCollector(Collector):
    """Makes the fleet's part of the page for Prometheus."""

    def __init__(self, fleet: SharedFleet, figures: FleetFigures, labels: dict[str, str]) -> None:
        self._fleet = fleet
        self._figures = figures
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield all of it, of one moment. O(replicas)."""
        replicas = self._fleet.status()
        self._figures.forget(each.name for each in replicas)
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
            for replica, claims in self._figures.claims.items():
                counter.add_metric([*texts, replica], getattr(claims, field))
            yield counter
        for name, text, number in self._totals():
            total = CounterMetricFamily(f"blockyard:fleet_{name}", text, labels=list(self._labels))
            total.add_metric(texts, number)
            yield total

    def _totals(self) -> list[tuple[str, str, int]]:
        figures = self._figures
        return [
            ("lost_attempts", "Requests that lost their replica.", figures.num_lost.total()),
            ("resumed_requests", "Those that went on elsewhere.", figures.num_resumed),
            ("resumed_tokens", "Tokens behind which they did.", figures.num_tokens_resumed),
        ]

    def _trusts(self, replicas: list[ReplicaStatus]) -> Metric:
        trusts = GaugeMetricFamily(
            "blockyard:fleet_replica_trust", "1 for the trust it has.", labels=[*self._labels, "replica", "trust"]
        )
        for each in replicas:
            trusts.add_metric([*self._labels.values(), each.name, each.trust], 1)
        return trusts


class FleetPage:
    """Makes the page for Prometheus (a `Page`). tenants: None where none share the pools."""

    def __init__(self, collectors: Iterable[Collector], tenants: TenantSums | None = None) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._tenants = tenants
        for each in [*collectors, *([] if tenants is None else [tenants])]:
            self._registry.register(each)
        ProcessCollector(registry=self._registry)

    async def text(self) -> bytes:
        """Return the page as it is now. O(replicas)."""
        if self._tenants is not None:
            await self._tenants.read()
        return generate_latest(self._registry)


_TOTALS = ("lost_attempts", "resumed_requests", "resumed_tokens", "handed_over_requests")
_LOADS = ("requests", "uncached", "held", "lost")


def fleet_state(
    fleet: SharedFleet, figures: FleetFigures, model_name: str, tenants: Sequence[TenantUse] = ()
) -> dict[str, Any]:
    """Return the replicas, what tenants have of them, what became of claims, and the last choices with their why.

    O(replicas * choices + tenants log tenants).
    """
    return {
        "object": "fleet",
        "model": model_name,
        "replicas": [
            {**each._asdict(), "lost": figures.num_lost[each.name], "prefill": each.name in fleet.prefills}
            for each in fleet.status()
        ],
        "tenants": [dict(zip(TENANT_FIELDS, line, strict=True)) for line in tenant_lines(tenants)],
        "claims": {name: asdict(claims) for name, claims in figures.claims.items()},
        "lost_attempts": figures.num_lost.total(),
        "resumed_requests": figures.num_resumed,
        "resumed_tokens": figures.num_tokens_resumed,
        "handed_over_requests": figures.num_handed_over,
        "choices": figures.shown_choices(),
    }


def one_state(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of several ingresses as one: loads and claims are added up, and trust is the least."""
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
    """Return one replica as two ingresses know it."""
    silences = [silence for silence in (before["silence"], each["silence"]) if silence is not None]
    return {
        **before,
        "is_believed": before["is_believed"] and each["is_believed"],
        "trust": each["trust"] if before["trust"] == "live" else before["trust"],
        "silence": max(silences, default=None),
        **{name: before[name] + each[name] for name in _LOADS},
    }
