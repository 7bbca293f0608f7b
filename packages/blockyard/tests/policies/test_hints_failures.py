"""Hints around a policy that raises: the cache's books stay whole."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import KVCacheManager, PolicyError
from blockyard.answers import HintOutcome
from blockyard.config import cache_config
from blockyard.errors import NotEnoughMemory
from blockyard.policies import EvictionPolicy
from blockyard_testing.cached import cached_tokens


class Shallow(EvictionPolicy):
    """Evicts the lowest depth first. It raises where it is told to."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.depths: dict[int, int] = {}
        self.fails_in = ""

    def fail(self, method: str) -> None:
        if self.fails_in == method:
            self.fails_in = ""
            raise ValueError(f"{method} fails")

    def insert(self, block: int, key: int, depth: int) -> None:
        assert block not in self.depths
        self.depths[block] = depth

    def remove(self, block: int) -> None:
        del self.depths[block]
        self.fail("remove")

    def evict(self) -> int:
        block = min(self.depths, key=lambda block: (self.depths[block], block))
        del self.depths[block]
        return block

    def clear(self) -> None:
        self.depths.clear()

    def grow(self, num_blocks: int) -> None:
        super().grow(num_blocks)
        self.fail("grow")


def run(cache: KVCacheManager, tokens: range, session: str | None = None) -> None:
    handle = cache.allocate(tokens, session=session)
    cache.commit([handle], cache.reserve([handle]).num_scheduled, [7])
    cache.free(handle)
    cache.check()


def made(num_blocks: int) -> tuple[KVCacheManager, list[Shallow]]:
    policies: list[Shallow] = []

    def make(capacity: int) -> EvictionPolicy:
        policies.append(Shallow(capacity))
        return policies[-1]

    sizes = {"max_num_seqs": 8, "max_model_len": 64}
    return KVCacheManager(cache_config(num_blocks=num_blocks, block_size=4, eviction_policy=make, **sizes)), policies


def test_a_policy_that_takes_a_block_out_and_then_raises_is_named_and_the_pool_is_whole() -> None:
    cache, policies = made(13)
    for number, session in enumerate("abc"):
        run(cache, range(100 * number, 100 * number + 15), session)
    cache.hint("b", over=True)
    policies[0].fails_in = "remove"
    before = cache.stats()
    with pytest.raises(PolicyError, match="Shallow: evict raised ValueError: remove fails"):
        cache.allocate(range(900, 917), session="d")
    cache.check()
    assert cache.stats() == before
    for _ in range(2):
        with pytest.raises(
            PolicyError, match=r"it raised ValueError in remove\(\), for an evicted block; set another policy"
        ):
            cache.allocate(range(900, 917), session="d")
        cache.check()
    cache.set_eviction_policy("lru")
    run(cache, range(900, 917), "d")
    assert cached_tokens(cache, range(15)) == 12


class NoMemory(dict[Any, Any]):
    """Has no memory for one more key."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self:
            raise MemoryError
        super().__setitem__(key, value)


def test_without_memory_for_the_name_of_a_session_nothing_begins() -> None:
    cache, _ = made(13)
    run(cache, range(15), "a")
    hints, before = cache._hints, cache.stats()
    names = hints._slots
    hints._slots = NoMemory(names)
    with pytest.raises(NotEnoughMemory, match="session: the system has no memory for one more session"):
        cache.allocate(range(100, 115), session="b")
    cache.check()
    assert cache.stats() == before
    assert (cache.num_seqs, cache.num_sessions) == (0, 1)
    seq = cache.allocate(range(200, 215))
    with pytest.raises(NotEnoughMemory, match="session"):
        cache.hint(seq, over=True)
    cache.free(seq)
    cache.check()
    run(cache, range(17), "a")
    hints._slots = dict(hints._slots)
    run(cache, range(100, 115), "b")
    assert cache.num_sessions == 2


def test_a_name_whose_sequence_does_not_begin_is_no_session() -> None:
    cache, policies = made(5)
    run(cache, range(13), "a")
    cache.hint("a", over=True)
    policies[0].fails_in = "remove"
    with pytest.raises(PolicyError):
        cache.allocate(range(100, 115), session="b")
    cache.check()
    assert cache.num_sessions == 1
    assert cache.hint("b", over=True) is HintOutcome.UNKNOWN


def test_a_policy_that_cannot_grow_fails_and_the_pool_grows_and_shrinks() -> None:
    cache, policies = made(10)
    run(cache, range(17), "a")
    policies[0].fails_in = "grow"
    cache.resize(60)
    for start in range(100, 900, 100):
        run(cache, range(start, start + 21), "b")
    assert cache.hint("b", over=True)
    cache.resize(10)
    cache.check()
    cache.set_eviction_policy("lru")
    run(cache, range(17), "b")
