"""Tokens by tenant: the largest by name, whatever names clients make up."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from blockyard import CacheSalt, InvalidArgument, LoRA, Span
from blockyard.metrics import TenantTokens, tenant_of

from ..support.seeds import run_seed


def test_names_of_tenants_keep_the_salt_secret() -> None:
    assert tenant_of(()) == tenant_of((Span("cat", 0, 4),)) == "none"
    assert tenant_of((LoRA("poet", "/weights"),)) == "lora:poet"
    secret = tenant_of((CacheSalt("hunter2"),))
    assert "hunter2" not in secret
    assert secret == tenant_of((CacheSalt("hunter2"), Span("cat", 0, 4)))
    assert secret != tenant_of((CacheSalt("hunter3"),))
    assert tenant_of((LoRA("poet"), CacheSalt("hunter2"))) == f"lora:poet {secret}"
    assert tenant_of((CacheSalt("\udc80"),)).startswith("salt:")


def test_few_tenants_are_all_shown() -> None:
    tenants = TenantTokens(3)
    tenants.count("a", 10, 0)
    tenants.count("b", 20, 16)
    tenants.count("a", 10, 8)
    assert tenants.tokens() == {"a": (20, 8), "b": (20, 16)}


def test_a_tenant_takes_a_place_when_it_has_twice_the_tokens_of_the_smallest() -> None:
    tenants = TenantTokens(2)
    tenants.count("large", 100, 50)
    tenants.count("small", 10, 0)
    tenants.count("new", 20, 5)
    assert tenants.tokens() == {"large": (100, 50), "small": (10, 0), "other": (20, 5)}
    tenants.count("new", 1, 1)  # twenty-one: more than twice ten
    assert tenants.tokens() == {"large": (100, 50), "new": (0, 0), "other": (21, 6)}
    tenants.count("new", 7, 7)
    tenants.count("small", 3, 0)
    assert tenants.tokens() == {"large": (100, 50), "new": (7, 7), "other": (24, 6)}


def test_made_up_names_push_nobody_out() -> None:
    """A thousand tenants that come once, among two that come often: those two are shown, and few places changed."""
    random.seed(run_seed())
    tenants, names, seen = TenantTokens(4), ["one", "two"], set()
    for number in range(20_000):
        name = random.choice(names) if random.random() < 0.3 else f"made up {number}"
        tenants.count(name, 50, 10)
        seen |= set(tenants.tokens())
        if number == 1000:
            assert set(names) <= set(tenants.tokens())
    assert set(names) <= set(tenants.tokens())
    assert len(tenants.tokens()) == 5
    assert len(seen) < 4 * 64
    assert len(tenants._candidates) <= 4 * 8
    assert sum(num_prompt for num_prompt, _ in tenants.tokens().values()) <= 20_000 * 50


def test_no_counter_goes_back_and_the_others_never_jump() -> None:
    random.seed(run_seed())
    tenants, before = TenantTokens(3), {}
    for _ in range(5000):
        size = random.randrange(1, 100)
        tenants.count(f"tenant {int(random.paretovariate(0.5))}", size, 0)
        after = tenants.tokens()
        for name, (num_prompt, _) in after.items():
            grown = num_prompt - before.get(name, (0, 0))[0]
            assert 0 <= grown <= size
        before = after


def test_a_registry_shows_them() -> None:
    registry, tenants = CollectorRegistry(), TenantTokens(2, {"engine": "0"})
    registry.register(tenants)
    tenants.count("lora:poet", 30, 16)
    labels = {"engine": "0", "tenant": "lora:poet"}
    assert registry.get_sample_value("blockyard:tenant_prompt_tokens_total", labels) == 30
    assert registry.get_sample_value("blockyard:tenant_hit_tokens_total", labels) == 16


@pytest.mark.parametrize("most", [0, 101, "3", True, None])
def test_how_many_is_a_number(most: object) -> None:
    with pytest.raises(InvalidArgument, match="most is"):
        TenantTokens(most)  # type: ignore[arg-type]
