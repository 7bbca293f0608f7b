"""Several caches: hand-over of prompts between engines, one request over several pools, one cache per rank.

    from blockyard_engine.parallel import HandoffReceiver, HandoffSender, PeerInfo

`docs/parallel.md` is the guide. The modules that move bytes need torch and are imported by themselves:
`blockyard_engine.parallel.link`, `tensors`, `transport`.
"""

from blockyard.errors import HandoffError, PeerMismatch, StaleOffer

from .cache_group import CacheGroup, Placement, add_tenant_uses
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
    "add_tenant_uses",
    "fetch",
    "head_runs",
    "require_compatible",
    "require_same_memory",
    "token_runs",
]
