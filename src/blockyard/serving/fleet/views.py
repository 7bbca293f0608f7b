"""GET /fleet shows this: the fleet as one ingress knows it, and what several know as one."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from ...fleet.shared import SharedFleet
from .figures import MAX_CHOICES, FleetFigures

_TOTALS = ("lost_attempts", "resumed_requests", "resumed_tokens", "handed_over_requests")
_LOADS = ("requests", "uncached", "held", "lost")


def fleet_state(fleet: SharedFleet, figures: FleetFigures, model_name: str) -> dict[str, Any]:
    """Return the replicas, what became of claims, and the last choices with their why. O(replicas * choices)."""
    return {
        "object": "fleet",
        "model": model_name,
        "replicas": [
            {**each._asdict(), "lost": figures.num_lost[each.name], "prefill": each.name in fleet.prefills}
            for each in fleet.status()
        ],
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
