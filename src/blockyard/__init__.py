"""Blockyard: the paged KV-cache block manager as a library.

    from blockyard import CacheConfig, KVCacheManager

`KVCacheManager` is the way in; `docs/architecture.md` is the map.
"""

from ._build import StaleBuildWarning, build_name, compiled, warn_if_stale
from .answers import Admission, CacheStats, SeqStatus
from .config import CacheConfig
from .core.block import KVCacheBlock
from .core.block_pool import BlockPool
from .core.free_queue import FreeKVCacheBlockQueue
from .core.lease import BlockLease
from .core.manager import KVCacheManager
from .core.plan import GroupPlan, StepPlan, SwapPlan
from .errors import (
    BlockyardError,
    CapacityError,
    DoubleFree,
    ForeignBlock,
    InvalidArgument,
    InvariantError,
    LogicError,
    MissingExtra,
    ModelError,
    NeverFits,
    OutOfBlocks,
    OutOfRows,
    SequenceNotReady,
    StalePlan,
    UnknownSequence,
)
from .groups import LayerGroup
from .keys import CacheSalt, ExtraKey, LoRA, Span

__version__ = "0.1.0"

__all__ = [
    "Admission",
    "BlockLease",
    "BlockPool",
    "BlockyardError",
    "CacheConfig",
    "CacheSalt",
    "CacheStats",
    "CapacityError",
    "DoubleFree",
    "ExtraKey",
    "ForeignBlock",
    "FreeKVCacheBlockQueue",
    "GroupPlan",
    "InvalidArgument",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheManager",
    "LayerGroup",
    "LoRA",
    "LogicError",
    "MissingExtra",
    "ModelError",
    "NeverFits",
    "OutOfBlocks",
    "OutOfRows",
    "SeqStatus",
    "SequenceNotReady",
    "Span",
    "StaleBuildWarning",
    "StalePlan",
    "StepPlan",
    "SwapPlan",
    "UnknownSequence",
    "__version__",
    "build_name",
    "compiled",
]

warn_if_stale()
