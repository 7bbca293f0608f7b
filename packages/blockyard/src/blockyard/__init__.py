"""Blockyard: the paged KV-cache block manager as a library.

    from blockyard import CacheConfig, KVCacheManager

Most programs need only these names:

    CacheConfig               size of the pool, and all other options
    KVCacheManager            sequences in, plans out: allocate, reserve, commit, fork, free
    Admission, SeqStatus      whether a prompt fits, and the outcome of a reservation
    StepPlan                  a step's slots, block tables, lengths and copies, as arrays
    BlockPool                 the pool without sequences, for an engine that keeps its own scheduler
    LoRA, CacheSalt, Span     what makes equal tokens different content: adapters, tenants, images
    CapacityError             base of the errors that are expected while serving: wait, preempt, or reject

The other modules are `blockyard.named` (a pool addressed by names), `policies`, `extending`, `steps`, `answers`,
`errors`, `events`, `routing`, `sizing`, `storage`, `observe`, `metrics` and `wire`. Tiers, the engine, the server and
the lab are separate packages. `docs/architecture.md` is the map.
"""

from ._build import compiled, warn_if_stale
from .answers import (
    Admission,
    SeqStatus,
)
from .cache_options import CPUPoolConfig, HintConfig, ObserveConfig, StateConfig
from .config import CacheConfig
from .core.blocks.caching import FoundBlocks
from .core.blocks.lease import BlockLease
from .core.manager import KVCacheManager
from .core.plan import StepPlan
from .core.pools.block_pool import BlockPool
from .errors import (
    BlockyardError,
    CapacityError,
    ConcurrentCall,
    DoubleFree,
    ForeignBlock,
    InvalidArgument,
    InvariantError,
    LogicError,
    MissingExtra,
    NeverFits,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    OverBudget,
    PolicyError,
    SequenceNotReady,
    StaleBlocks,
    StalePlan,
    StepsInFlight,
    UnknownSequence,
)
from .groups import LayerGroup, StateSpec
from .keys import CacheSalt, LoRA, Span
from .state_hints import StateHints

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "BlockLease",
    "BlockPool",
    "BlockyardError",
    "CPUPoolConfig",
    "CacheConfig",
    "CacheSalt",
    "CapacityError",
    "ConcurrentCall",
    "DoubleFree",
    "ForeignBlock",
    "FoundBlocks",
    "HintConfig",
    "InvalidArgument",
    "InvariantError",
    "KVCacheManager",
    "LayerGroup",
    "LoRA",
    "LogicError",
    "MissingExtra",
    "NeverFits",
    "NotEnoughMemory",
    "ObserveConfig",
    "OutOfBlocks",
    "OutOfRows",
    "OverBudget",
    "PolicyError",
    "SeqStatus",
    "SequenceNotReady",
    "Span",
    "StaleBlocks",
    "StalePlan",
    "StateConfig",
    "StateHints",
    "StateSpec",
    "StepPlan",
    "StepsInFlight",
    "UnknownSequence",
    "__version__",
    "compiled",
]

warn_if_stale()
