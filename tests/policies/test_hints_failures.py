"""Hints around a policy that raises: the cache's books stay whole."""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, KVCacheManager
from blockyard.core.policies.guarded import Guarded
from blockyard.policies import EvictionPolicy


class Shallow(EvictionPolicy):
    """The lowest depth first, so that a guard evicts what stands below it before. It raises where it is told to."""

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


def made(num_blocks: int, is_guarded: bool) -> tuple[KVCacheManager, list[Shallow]]:
    policies: list[Shallow] = []

    def make(capacity: int) -> EvictionPolicy:
        policies.append(Shallow(capacity))
        return Guarded(policies[-1]) if is_guarded else policies[-1]

    sizes = {"max_num_seqs": 8, "max_model_len": 64}
    return KVCacheManager(CacheConfig(num_blocks=num_blocks, block_size=4, eviction_policy=make, **sizes)), policies


@pytest.mark.parametrize("is_guarded", [False, True])
def test_a_policy_that_cannot_grow_fails_and_the_pool_grows_and_shrinks(is_guarded: bool) -> None:
    cache, policies = made(10, is_guarded)
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
