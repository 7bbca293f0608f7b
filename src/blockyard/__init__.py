"""Blockyard: the paged KV-cache block manager as a library.

    from blockyard import CacheConfig, KVCacheManager

`KVCacheManager` is the way in; `docs/architecture.md` is the map.
"""

from ._build import StaleBuildWarning, build_name, compiled, warn_if_stale
from .answers import (
    Admission,
    AllocationEvent,
    CacheStats,
    HintOutcome,
    Histogram,
    Holding,
    MissCauses,
    NameEvent,
    Residency,
    Resize,
    SeqStatus,
)
from .config import CacheConfig
from .core.block_pool import BlockPool
from .core.manager import KVCacheManager
from .core.named_pool import NamedPool
from .core.plan import GroupPlan, PlanReceiver, PlanSender, StepBuffers, StepPlan, SwapPlan
from .core.policies.base import EvictionPolicy
from .core.pool.block import KVCacheBlock
from .core.pool.block_queue import FreeKVCacheBlockQueue
from .core.pool.found import FoundBlocks
from .core.pool.lease import BlockLease
from .errors import (
    BlockyardError,
    CapacityError,
    ConcurrentCall,
    DivergedRank,
    DoubleFree,
    ForeignBlock,
    HandoffError,
    InvalidArgument,
    InvariantError,
    LogicError,
    MissingExtra,
    ModelError,
    NeverFits,
    NotEnoughMemory,
    OutOfBlocks,
    OutOfRows,
    OverBudget,
    PeerMismatch,
    PolicyError,
    PublisherError,
    RankError,
    SequenceNotReady,
    StaleBlocks,
    StaleOffer,
    StalePlan,
    StepsInFlight,
    TraceError,
    UnknownSequence,
)
from .groups import LayerGroup
from .keys import CacheSalt, ExtraKey, LoRA, Span
from .kv_events import BlockChanges, KVCacheEvents

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "AllocationEvent",
    "BlockChanges",
    "BlockLease",
    "BlockPool",
    "BlockyardError",
    "CacheConfig",
    "CacheSalt",
    "CacheStats",
    "CapacityError",
    "ConcurrentCall",
    "DivergedRank",
    "DoubleFree",
    "EvictionPolicy",
    "ExtraKey",
    "ForeignBlock",
    "FoundBlocks",
    "FreeKVCacheBlockQueue",
    "GroupPlan",
    "HandoffError",
    "HintOutcome",
    "Histogram",
    "Holding",
    "InvalidArgument",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheEvents",
    "KVCacheManager",
    "LayerGroup",
    "LoRA",
    "LogicError",
    "MissCauses",
    "MissingExtra",
    "ModelError",
    "NameEvent",
    "NamedPool",
    "NeverFits",
    "NotEnoughMemory",
    "OutOfBlocks",
    "OutOfRows",
    "OverBudget",
    "PeerMismatch",
    "PlanReceiver",
    "PlanSender",
    "PolicyError",
    "PublisherError",
    "RankError",
    "Residency",
    "Resize",
    "SeqStatus",
    "SequenceNotReady",
    "Span",
    "StaleBlocks",
    "StaleBuildWarning",
    "StaleOffer",
    "StalePlan",
    "StepBuffers",
    "StepPlan",
    "StepsInFlight",
    "SwapPlan",
    "TraceError",
    "UnknownSequence",
    "__version__",
    "build_name",
    "compiled",
]

warn_if_stale()
