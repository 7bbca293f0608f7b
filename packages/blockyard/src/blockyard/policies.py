"""The eviction policies and their contract, from one place: `from blockyard.policies import EvictionPolicy, Score`.

Names for `CacheConfig(eviction_policy=...)` are the keys of `POLICIES`; each policy is a class of `core/policies`.
`make_policy` makes one from such a name, for code that tells and asks it without a pool. `Places` says where
states are kept.
"""

from .core.policies import POLICIES, make_policy
from .core.policies.base import EvictionPolicy
from .core.policies.learned.density import Density
from .core.policies.simple.arc import ARC
from .core.policies.simple.heaps import FIFO, LFU, Score
from .core.policies.simple.lru import LRU
from .core.policies.simple.s3fifo import S3FIFO
from .core.policies.states.places import Places

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "Density",
    "EvictionPolicy",
    "Places",
    "Score",
    "make_policy",
]
