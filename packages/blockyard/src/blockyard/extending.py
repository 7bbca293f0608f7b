"""Core classes for authors of policies, simulators and pools: `from blockyard.extending import LRUStack`.

These names may change with a minor version, unlike those of `blockyard`.
"""

from .core.blocks.block import KVCacheBlock
from .core.policies.states.checkpoint import MOST_SESSIONS
from .core.pools.lease_pool import LeasePool
from .core.simulation.belady import Belady
from .core.simulation.hinted_run import HintedRun
from .core.simulation.policy_run import PolicyRun
from .core.simulation.seen import SeenContents
from .core.simulation.stack_distance import LRUStack
from .core.simulation.state_run import StateRun
from .core.tokens import integer_array

__all__ = [
    "MOST_SESSIONS",
    "Belady",
    "HintedRun",
    "KVCacheBlock",
    "LRUStack",
    "LeasePool",
    "PolicyRun",
    "SeenContents",
    "StateRun",
    "integer_array",
]
