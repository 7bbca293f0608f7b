"""The eviction policies and their contract, from one place: `from blockyard.policies import EvictionPolicy, Score`.

Names for `CacheConfig(eviction_policy=...)` are the keys of `POLICIES`; each policy is a file of `core/policies`.
`make_policy` makes one from such a name, for code that tells and asks it without a pool.
"""

from .core.policies import POLICIES, make_policy
from .core.policies.arc import ARC
from .core.policies.auto import Auto
from .core.policies.base import EvictionPolicy
from .core.policies.density import Density
from .core.policies.fifo import FIFO
from .core.policies.guarded import Guarded
from .core.policies.lfu import LFU
from .core.policies.lru import LRU
from .core.policies.s3fifo import S3FIFO
from .core.policies.score import Score

__all__ = [
    "ARC",
    "FIFO",
    "LFU",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "Auto",
    "Density",
    "EvictionPolicy",
    "Guarded",
    "Score",
    "make_policy",
]
