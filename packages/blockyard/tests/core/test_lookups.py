"""A prompt is looked up once, whoever asks: admission, causes, partial hits and the row all take the same `Hit`."""

from __future__ import annotations

import pytest

from blockyard import Admission, InvalidArgument, LayerGroup

from ..support.checked import Checked, prompt
from ..support.snapshot import snapshot

CONFIGS = {
    "plain": {},
    "windows and a CPU pool": {"groups": (LayerGroup(4), LayerGroup(4, 6)), "num_cpu_blocks": 20},
    "partial hits and causes": {"partial_hits": True, "track_misses": True},
    "own policy": {"eviction_policy": "lfu"},
}


def lookups(cache: Checked) -> int:
    return int(cache.cache._allocate.admission.num_lookups)


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_allocation_does_one_lookup(settings: dict[str, object]) -> None:
    cache = Checked(40, **settings)
    cache.free(cache.prefilled(prompt(1, 13)))
    before = lookups(cache)
    seq = cache.allocate(prompt(1, 15))
    assert cache.num_computed_tokens(seq) >= 12
    assert lookups(cache) == before + 1
    cache.free(cache.try_allocate(prompt(1, 15)))
    assert lookups(cache) == before + 2


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_try_allocate_returns_a_handle_or_the_reason(settings: dict[str, object]) -> None:
    cache = Checked(12, max_num_seqs=2, **settings)
    first = cache.try_allocate(prompt(1, 17), holder="first")
    assert isinstance(first, int)
    assert cache.running() == {first: "first"}
    before = snapshot(cache.cache)
    assert cache.try_allocate(prompt(2, 40)) is cache.can_allocate(prompt(2, 40))
    assert cache.try_allocate(prompt(2, 1000)) is Admission.NEVER
    assert cache.try_allocate(prompt(2, 8), num_seqs=2) is Admission.LATER
    with pytest.raises(InvalidArgument, match="token_ids is empty"):
        cache.try_allocate([])
    assert snapshot(cache.cache) == before
