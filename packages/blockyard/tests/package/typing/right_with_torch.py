"""Uses of the public API with tensors, which type checkers accept if torch is installed. Nothing here is run."""

import torch

from blockyard import CacheConfig, KVCacheManager, StepPlan

cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
seq: int = cache.allocate(torch.tensor([1, 2, 3]))
plan: StepPlan = cache.reserve([seq], 1)
cache.commit([seq], plan.num_scheduled, torch.tensor([7]))
