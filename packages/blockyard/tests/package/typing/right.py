"""Uses of the public API that type checkers accept; `test_typing.py` runs mypy on it. Nothing here is run."""

from array import array

import numpy as np
import numpy.typing as npt

from blockyard import (
    BlockLease,
    BlockPool,
    CacheConfig,
    CacheSalt,
    CPUPoolConfig,
    HintConfig,
    KVCacheManager,
    LayerGroup,
    LoRA,
    ObserveConfig,
    StateConfig,
    StateHints,
    StateSpec,
    StepPlan,
)
from blockyard.answers import Resize
from blockyard.policies import Score

cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4, eviction_policy="lru"))
tokens: npt.NDArray[np.int32] = np.arange(9, dtype=np.int32)

# Tokens: whatever holds integers.
seq: int = cache.allocate([1, 2, 3])
cache.allocate((1, 2, 3))
cache.allocate(tokens)
cache.allocate(tokens.astype(np.int64))
cache.allocate(array("i", [1, 2, 3]))
cache.allocate([np.int32(1), 2], holder="a name", num_seqs=np.int64(2), resumed=True)
cache.allocate([1], extra_keys=(CacheSalt("tenant"), LoRA("adapter")))
cache.allocate([1], extra_keys=[LoRA("adapter")])
cache.allocate_batch([[1, 2], [3]], holders=["a", "b"])
cache.allocate_batch([tokens, [1]])
names: list[list[int]] = [[1], [2]]
seqs: list[int] = cache.allocate_batch(names)

# A step.
plan: StepPlan = cache.reserve(seqs, 1)
cache.reserve(np.array(seqs), np.array([1, 2]))
cache.reserve(seq, [1])
slots: npt.NDArray[np.int64] = plan.slot_mapping
cache.commit(seqs, 1, [7, 8])
cache.commit(seqs, [1, 1], [[7, -1], [8, 9]])
cache.commit(seqs, 0)
cache.append(seqs, np.array([1, 2]))
fits: bool = cache.can_append(seqs)
forks: list[int] = cache.fork(seq, 2)
cache.regroup(seqs, [0, 0])
cache.truncate(seq, 3)
cache.free(seq)
cache.free(forks)
cache.free(plan.rows)

# Life at run time.
answer: Resize = cache.resize(200)
cache.set_eviction_policy("arc")
cache.set_eviction_policy(Score)
cache.set_eviction_policy(lambda num_blocks: Score(num_blocks, 100, 2))
cache.advance_time(1.5)
cache.advance_time(np.float64(2))
cache.retain(tokens, priority=2, expires_at=3)
num_blocks: int = cache.block_size + cache.pool.num_used_blocks

# A hybrid model, and the options in parts.
hybrid = KVCacheManager(
    CacheConfig(
        groups=(LayerGroup(16, token_bytes=64), StateSpec(state_bytes=4096, checkpoint_every=512)),
        num_bytes=2**20,
        states=StateConfig(checkpoints=("branch", "every:512"), order="lru"),
        cpu=CPUPoolConfig(num_blocks=100),
        hints=HintConfig(retention_blocks=10),
        observe=ObserveConfig(track_misses=True),
    )
)
seq = hybrid.allocate(tokens, states=StateHints(checkpoints=[5], waiting_prompts=[tokens, [1]]))
hybrid.allocate(tokens, states=StateHints(external_state_tokens=np.int64(9)))
blocks: npt.NDArray[np.int32] = hybrid.states.blocks(tokens, extra_keys=(CacheSalt("tenant"),))
hybrid.states.skip(seq, 9, checkpoint=5)
hybrid.states.drop_checkpoints(seq)
slot: int = hybrid.states.slot(seq)

pool = BlockPool(10, 4, hash_seed=7)
lease: BlockLease = pool.get_new_blocks(2, holder="me")
pool.cache_full_blocks(lease, [1, 2, 3, 4])
pool.free_blocks(lease)
