"""Tokens by tenant: the largest by name, whatever names clients make up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry

from blockyard import CacheConfig, CacheSalt, InvalidArgument, KVCacheManager, LoRA, ObserveConfig, Span
from blockyard.answers import MissCauses
from blockyard.metrics import TenantTokens, tenant_of
from blockyard_testing.seeds import run_seed


def test_names_of_tenants_keep_the_salt_secret() -> None:
    assert tenant_of(()) == tenant_of((Span("cat", 0, 4),)) == "none"
    assert tenant_of((LoRA("poet", "/weights"),)) == "lora:poet"
    secret = tenant_of((CacheSalt("hunter2"),))
    assert "hunter2" not in secret
    assert secret == tenant_of((CacheSalt("hunter2"), Span("cat", 0, 4)))
    assert secret != tenant_of((CacheSalt("hunter3"),))
    assert tenant_of((LoRA("poet"), CacheSalt("hunter2"))) == f"lora:poet {secret}"
    assert tenant_of((CacheSalt("\u20ac"),)).startswith("salt:")


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


def test_invented_tenant_names_do_not_replace_large_tenants() -> None:
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


def test_registry_exports_tenant_tokens() -> None:
    registry, tenants = CollectorRegistry(), TenantTokens(2, {"engine": "0"})
    registry.register(tenants)
    tenants.count("lora:poet", 30, 16)
    labels = {"engine": "0", "tenant": "lora:poet"}
    assert registry.get_sample_value("blockyard:tenant_prompt_tokens_total", labels) == 30
    assert registry.get_sample_value("blockyard:tenant_hit_tokens_total", labels) == 16


@pytest.mark.parametrize("most", [0, 101, "3", True, None])
def test_invalid_numbers_of_tenants_are_rejected(most: object) -> None:
    with pytest.raises(InvalidArgument, match="most is"):
        TenantTokens(most)  # type: ignore[arg-type]


def test_misses_by_cause_are_those_of_each_tenants_prompts() -> None:
    """Against the causes of every prompt, added up; those of a tenant that lost its place go with its tokens."""
    config = CacheConfig(
        num_blocks=20, block_size=4, max_num_seqs=4, max_model_len=64, observe=ObserveConfig(track_misses=True)
    )
    cache, tenants = KVCacheManager(config), TenantTokens(2, {"engine": "0"})
    random.seed(run_seed())
    wanted: dict[str, Counter[str]] = {}
    for _ in range(300):
        keys = random.choice([(LoRA("a"),), (LoRA("b"),), (LoRA("c"),), (LoRA("d"),)])
        tokens = [*range(random.choice([4, 8])), *random.choices(range(100, 102), k=random.randrange(1, 24))]
        seq = cache.allocate(tokens, extra_keys=keys)
        cache.commit([seq], cache.reserve([seq]).num_scheduled)
        misses = cache.miss_causes(seq)
        cache.free(seq)
        shown = tenants.tokens().keys() - {"other"}
        place = tenant_of(keys) if tenant_of(keys) in shown or len(shown) < 2 else "other"
        wanted.setdefault(place, Counter()).update(misses.missed)
        tenants.count(tenant_of(keys), len(tokens), misses.num_hit, misses)
        for gone in shown - tenants.tokens().keys():
            wanted.pop(gone, None)
        assert tenants.missed() == wanted
        for tenant, (num_prompt, num_hit) in tenants.tokens().items():
            assert sum(wanted.get(tenant, Counter()).values()) == num_prompt - num_hit
    assert "other" in wanted
    assert all(wanted["other"][cause] for cause in ("tail", "never_seen", "evicted", "other_keys"))
    registry = CollectorRegistry()
    registry.register(tenants)
    labels = {"engine": "0", "tenant": "other", "cause": "evicted"}
    assert registry.get_sample_value("blockyard:tenant_missed_tokens_total", labels) == wanted["other"]["evicted"]


def test_made_up_names_take_no_memory_with_their_causes() -> None:
    tenants = TenantTokens(3)
    for number in range(20_000):
        tenants.count(f"lora:{number}", 10, 0, MissCauses(0, 1, 9, 0, 0, 0, -1))
    assert len(tenants.missed()) == 4
    assert sum(causes["never_seen"] for causes in tenants.missed().values()) == 9 * 20_000


def test_a_place_that_changes_hands_leaves_no_causes_behind() -> None:
    tenants = TenantTokens(1)
    tenants.count("small", 10, 0, MissCauses(0, 1, 9, 0, 0, 0, -1))
    for _ in range(9):
        tenants.count("large", 100, 0, MissCauses(0, 0, 100, 0, 0, 0, -1))
    assert set(tenants.tokens()) == set(tenants.missed()) == {"large", "other"}
    for tenant, (num_prompt, num_hit) in tenants.tokens().items():
        assert sum(tenants.missed()[tenant].values()) == num_prompt - num_hit
