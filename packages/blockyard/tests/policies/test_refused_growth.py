"""A pool whose growth was refused for want of memory grows by less: its policy is as it was, or larger."""

from __future__ import annotations

import pytest

from blockyard import CacheConfig, HintConfig, KVCacheManager
from blockyard.errors import NotEnoughMemory
from blockyard_testing.own_policies import MRU


class Short(MRU):
    """It finds no memory for more than twenty blocks."""

    def grow(self, num_blocks: int) -> None:
        if num_blocks > 20:
            raise MemoryError("none")
        super().grow(num_blocks)


@pytest.mark.parametrize("kind", ["plain", "retention", "hinted"])
def test_a_smaller_growth_after_a_refused_one(kind: str) -> None:
    retained = 4 if "retention" in kind else 0
    config = CacheConfig(
        num_blocks=8, block_size=4, watermark=0.0, eviction_policy=Short, hints=HintConfig(retention_blocks=retained)
    )
    cache = KVCacheManager(config)
    if kind == "hinted":
        cache.free(cache.allocate(list(range(4)), session="a"))
    with pytest.raises(NotEnoughMemory):
        cache.resize(30)
    cache.check()
    cache.resize(12)
    cache.check()
    for prompt in range(8):
        seq = cache.allocate([100 * prompt + token for token in range(20)])
        cache.commit([seq], cache.reserve([seq]).num_scheduled, [1])
        cache.free(seq)
        cache.check()
    assert cache.stats().num_evicted_blocks > 20
