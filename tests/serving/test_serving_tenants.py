"""Tokens by tenant under GET /metrics: only where they are asked for, and never a salt."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("torch")

from blockyard import CacheSalt
from blockyard.metrics import tenant_of

from ..support.servers import Running, running_server, tiny_engine

PROMPT = "A prompt of fifty characters, which are fifty tokens"


def tenants_of(running: Running) -> dict[tuple[str, str], float]:
    _, _, page = running.call("GET", "/metrics")
    assert b"secret" not in page
    found = re.findall(r'^blockyard:tenant_(\w+)_tokens_total\{.*tenant="(.*)"\} (\S+)$', page.decode(), re.MULTILINE)
    return {(name, tenant): float(value) for name, tenant, value in found}


def ask(running: Running, **fields: object) -> None:
    assert running.post("/v1/completions", prompt=PROMPT, max_tokens=1, **fields)[0] == 200


def test_tenants_are_counted_by_the_digest_of_their_salt() -> None:
    with running_server(tiny_engine(), tenant_metrics=2) as running:
        for salt in ("secret a", "secret a", "secret b"):
            ask(running, cache_salt=salt)
        ask(running)
        one, two = (tenant_of((CacheSalt(salt),)) for salt in ("secret a", "secret b"))
        assert tenants_of(running) == {
            ("prompt", one): 104,
            ("hit", one): 48,
            ("prompt", two): 52,
            ("hit", two): 0,
            ("prompt", "other"): 52,
            ("hit", "other"): 0,
        }


def test_a_server_shows_no_tenants_unasked() -> None:
    with running_server(tiny_engine()) as running:
        ask(running, cache_salt="secret a")
        assert tenants_of(running) == {}
