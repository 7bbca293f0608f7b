"""A prompt is looked up once, whoever asks: admission, causes, partial hits and the row all take the same `Hit`."""

from __future__ import annotations

import gc
import weakref

import pytest

from blockyard import Admission, BlockPool, CacheConfig, InvalidArgument, KVCacheManager, LayerGroup

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot

CONFIGS = {
    "plain": {},
    "windows and a CPU pool": {"groups": (LayerGroup(4), LayerGroup(4, 6)), "num_cpu_blocks": 20},
    "partial hits and causes": {"partial_hits": True, "track_misses": True},
    "own policy": {"eviction_policy": "lfu"},
}


def lookups(cache: Checked) -> int:
    return int(cache.cache._admitting.num_lookups)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_one_lookup_an_allocation(settings: dict[str, object]) -> None:
    cache = Checked(40, **settings)
    cache.free(cache.prefilled(prompt(1, 13)))
    before = lookups(cache)
    seq = cache.allocate(prompt(1, 15))
    assert cache.num_computed_tokens(seq) >= 12
    assert lookups(cache) == before + 1
    cache.free(cache.try_allocate(prompt(1, 15)))
    assert lookups(cache) == before + 2


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_try_allocate_answers_a_handle_or_why_not(settings: dict[str, object]) -> None:
    cache = Checked(12, max_num_seqs=2, **settings)
    first = cache.try_allocate(prompt(1, 17), "first")
    assert isinstance(first, int)
    assert cache.running() == {first: "first"}
    before = snapshot(cache.cache)
    assert cache.try_allocate(prompt(2, 40)) is cache.can_allocate(prompt(2, 40))
    assert cache.try_allocate(prompt(2, 1000)) is Admission.NEVER
    assert cache.try_allocate(prompt(2, 8), num_seqs=2) is Admission.LATER
    with pytest.raises(InvalidArgument, match="token_ids is empty"):
        cache.try_allocate([])
    assert snapshot(cache.cache) == before


def test_weak_references_to_a_manager_and_a_pool() -> None:
    cache, pool = KVCacheManager(CacheConfig(8)), BlockPool(8)
    told: list[str] = []
    references = [weakref.ref(cache, lambda _: told.append("cache")), weakref.ref(cache.pool), weakref.ref(pool)]
    by_name = weakref.WeakValueDictionary({"cache": cache})
    assert [reference() for reference in references] == [cache, cache.pool, pool]
    del cache, pool
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert told == ["cache"]
    assert dict(by_name) == {}
