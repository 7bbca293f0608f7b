"""Uses of the public API that type checkers report, each in a line marked so, and nothing else. Nothing here is run."""

import numpy as np

from blockyard import BlockPool, CacheConfig, KVCacheManager, StateHints, StateSpec

cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
KVCacheManager(num_blocks=100)  # error
KVCacheManager({"num_blocks": 100})  # error
CacheConfig(num_blocks="100")  # error
handle: str = cache.allocate([1, 2, 3])  # error
cache.allocate("a prompt")  # error
cache.allocate(["a", "b"])  # error
cache.allocate([1.5])  # error
cache.allocate(np.zeros(3))  # error
cache.allocate(None)  # error
cache.allocate([1], holder=7)  # error
cache.allocate([1], "holder")  # error
cache.allocate([1], states=[16])  # error
cache.retain([1], 5)  # error
cache.commit([1], 1, None, 2)  # error
cache.states.skip(1, 2, 3)  # error
cache.states.blocks(3)  # error
CacheConfig(100, track_misses=True)  # error
CacheConfig(100, observe={"track_misses": True})  # error
StateSpec(16)  # error
StateHints(boundaries=[16])  # error
cache.allocate([1], extra_keys=["salt"])  # error
cache.allocate([1], extra_keys="salt")  # error
cache.allocate([1], num_seqs=2.0)  # error
cache.allocate([1], resumed=1)  # error
cache.allocate([1], salt="x")  # error
cache.allocate_batch([1, 2, 3])  # error
cache.allocate_batch(np.zeros((2, 3), dtype=np.int32))  # error
cache.reserve("x", 1)  # error
cache.reserve([1], [None])  # error
batch: int = cache.num_tokens([1, 2])  # error
one: list[int] = cache.num_computed_tokens(1)  # error
cache.num_tokens("x")  # error
cache.reserve([None], 1)  # error
slots = cache.reserve([1], 1).slots  # error
cache.commit([1], 1, ["a"])  # error
cache.append([1], None)  # error
cache.fork([1])  # error
cache.regroup([1], 0)  # error
cache.truncate(1, "2")  # error
cache.free("x")  # error
cache.free(None)  # error
cache.resize("200")  # error
cache.set_eviction_policy(3)  # error
cache.advance_time("now")  # error
cache.retain([1], expires_at="soon")  # error
cache.num_free_blocks = 3  # error
cache.usage()  # error
cache.frees(1)  # error

pool = BlockPool(10, block_size="4")  # error
pool.get_new_blocks(2.5)  # error
pool.free_blocks([1, 2])  # error
pool.block("1")  # error
