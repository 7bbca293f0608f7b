"""Tiers keep KV-cache objects below the GPU's memory. A load is exact, or a miss with its cause.

    from blockyard_tiers import FileTier, Transfer, layout_id, object_names

Read it in this order:

    tier             the interface: transfers, their results, causes of misses
    header           names of objects, and the header of an object
    worker           the base of all tiers: queues, threads, circuit breakers (circuit_breaker)
    index            the objects that a tier knows to be present, and their order of eviction
    files            a folder; no server
    redis            a Redis server
    buckets          an object store: S3, GCS, Azure
    mooncake         a Mooncake Store: memory that engines lend
    peer             objects of another process; peer_server serves them
    tier_spec        opens a tier from text: file:/var/kv,bytes=50GiB

    offload          stores computed blocks of a manager in tiers, and loads prefixes of prompts
    context          the parts that storing and loading share
    uses             how an engine uses a tier, and which blocks it stores there
    engine_memory    interfaces of an engine's blocks and states; kv_blocks and state_objects implement them
    transfers        records of requests, and of their loads and stores under way
    saver            stores blocks and states, from the rows of store_buffers
    finder           searches tiers for a prompt, and decides how much of it to load
    loader           loads prefixes, and writes them into blocks
    write_back       stores blocks that the pool evicts, with names from pool_names
    snapshot         the pool's contents in a tier and a file, for a warm start

    adapter          the common part of the adapters for vLLM, SGLang and LMCache (lmcache_l2)

docs/tiers.md is the guide. Needs xxhash: `pip install 'blockyard[tiers]'`.
`RedisTier` needs the extra `redis`, `ObjectTier` `buckets`, `MooncakeTier` `mooncake`, `KVBlocks` `engine`; each is
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .adapter import BatchResult, TierAdapter
from .files import FileTier
from .header import BadObject, Header, NameChain, layout_id, object_names
from .offload import Offload
from .peer import PeerTier
from .peer_server import PeerServer
from .snapshot import Snapshot
from .tier import Cause, FirstMatch, Prefix, Tier, TierStats, Transfer, TransferResult
from .tier_spec import open_tier, open_tier_use
from .uses import OffloadReading, TierReading, TierUse
from .worker import BackendError, WorkingTier

if TYPE_CHECKING:
    from .buckets import ObjectTier
    from .kv_blocks import KVBlocks
    from .mooncake import MooncakeTier
    from .redis import RedisTier
    from .state_objects import StateObjects

from .engine_memory import Blocks, IsDone, States
from .index import ObjectIndex
from .uses import require_write_policy

__all__ = [
    "BackendError",
    "BadObject",
    "BatchResult",
    "Blocks",
    "Cause",
    "FileTier",
    "FirstMatch",
    "Header",
    "IsDone",
    "KVBlocks",
    "MooncakeTier",
    "NameChain",
    "ObjectIndex",
    "ObjectTier",
    "Offload",
    "OffloadReading",
    "PeerServer",
    "PeerTier",
    "Prefix",
    "RedisTier",
    "Snapshot",
    "StateObjects",
    "States",
    "Tier",
    "TierAdapter",
    "TierReading",
    "TierStats",
    "TierUse",
    "Transfer",
    "TransferResult",
    "WorkingTier",
    "layout_id",
    "object_names",
    "open_tier",
    "open_tier_use",
    "require_write_policy",
]

_LATER = {
    "KVBlocks": ".kv_blocks",
    "MooncakeTier": ".mooncake",
    "ObjectTier": ".buckets",
    "RedisTier": ".redis",
    "StateObjects": ".state_objects",
}


def __getattr__(name: str) -> object:
    """Import a class that needs an extra on first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
