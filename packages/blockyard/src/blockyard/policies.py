"""The eviction policies and their interface: `from blockyard.policies import EvictionPolicy, Score`.

The keys of `POLICIES` are the names for `CacheConfig(eviction_policy=...)`. `make_policy` makes a policy by name
without a pool. `CheckpointRules` chooses at which positions states are checkpointed.
"""

from .core.policies import POLICIES, make_policy
from .core.policies.base import EvictionPolicy
from .core.policies.learned.density import Density
from .core.policies.simple.arc import ARC
from .core.policies.simple.heaps import FIFO, LFU, Score
from .core.policies.simple.lru import LRU
from .core.policies.simple.s3fifo import S3FIFO
from .core.policies.states.checkpoint_rules import CheckpointRules

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "CheckpointRules",
    "Density",
    "EvictionPolicy",
    "Score",
    "make_policy",
]
