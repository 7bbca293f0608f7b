"""The capacity model: what a model keeps for each token, how many blocks fit, and how many sequences.

    from blockyard.sizing import KVCacheSpec, num_gpu_blocks

It counts blocks with the same `LayerGroup` as the allocator, and needs nothing outside the standard library.
`docs/sizing.md` has examples and says what is assumed.
"""

from .advice import BlockSizeAdvice, CacheBudgetAdvice, advise_block_size, advise_cache_budget
from .layers import AttentionLayer, StateLayer, StatePart
from .memory import MemoryProfile, num_cpu_blocks, num_gpu_blocks, profile
from .pages import PageGroup
from .spec import KVCacheSpec

__all__ = [
    "AttentionLayer",
    "BlockSizeAdvice",
    "CacheBudgetAdvice",
    "KVCacheSpec",
    "MemoryProfile",
    "PageGroup",
    "StateLayer",
    "StatePart",
    "advise_block_size",
    "advise_cache_budget",
    "num_cpu_blocks",
    "num_gpu_blocks",
    "profile",
]
