"""Several caches: a prompt computed here and decoded there, one request over several pools, a cache for each rank.

    from blockyard_engine.parallel import HandoffReceiver, HandoffSender, PeerInfo

`docs/parallel.md` is the guide. What moves bytes needs torch and is imported by itself:
`blockyard_engine.parallel.tensors`, `blockyard_engine.parallel.distributed`.
"""

from blockyard.errors import HandoffError, PeerMismatch, StaleOffer

from .cache_group import CacheGroup, Placement, added_uses
from .local import LocalBlocks, fetch
from .multi_pool import MultiBlockPool, MultiLease
from .offer import Offer, OfferId
from .peer import HeadRun, HeadShards, PeerInfo, head_runs, require_compatible, require_same_memory
from .receiver import HandoffReceiver, Transfer
from .runs import TokenRuns, TransferPlan, token_runs
from .sender import HandoffSender

__all__ = [
    "CacheGroup",
    "HandoffError",
    "HandoffReceiver",
    "HandoffSender",
    "HeadRun",
    "HeadShards",
    "LocalBlocks",
    "MultiBlockPool",
    "MultiLease",
    "Offer",
    "OfferId",
    "PeerInfo",
    "PeerMismatch",
    "Placement",
    "StaleOffer",
    "TokenRuns",
    "Transfer",
    "TransferPlan",
    "added_uses",
    "fetch",
    "head_runs",
    "require_compatible",
    "require_same_memory",
    "token_runs",
]
