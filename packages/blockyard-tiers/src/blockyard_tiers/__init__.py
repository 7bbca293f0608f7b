"""Tiers keep objects below the GPU's memory, in files, servers or buckets: a load is exact, or a miss with its cause.

    from blockyard_tiers import FileTier, Job, layout_id, object_names

Read it in this order:

    tier      the interface: calls, jobs, outcomes, causes
    header    what each object says of itself, and its name
    worker    queues, threads, circuits: what all tiers share
    index     which objects are known, and which one goes next
    files     a folder; nothing to start
    redis     a Redis server
    buckets   an object store: S3, GCS, Azure
    mooncake  a Mooncake Store: memory that engines lend
    peer      what another process serves, over the wire; peer_server serves
    offload   binds a manager and its KV storage to tiers: stores what is computed, loads what prompts begin with
    saving    what an offload stores; stores has its buffers on their way out
    loading   what an offload loads for waiting requests, and writes into their blocks
    context   what saving and loading share
    finding   which tiers have what of a prompt, and how much of it is loaded
    loads     what an offload knows of a request, and of what is loaded for it
    memory    what an offload sees of blocks and states
    states    the names of states, and where a prompt may have one
    uses      how an engine uses a tier: when it stores there
    write_back stores what the pool evicts, under the names that pool_names takes from its index
    snapshot  what a pool holds, stored and written down, and brought back into another
    kv_blocks the blocks of a `blockyard.storage.KVCache` as objects; state_objects the states of hybrid models
    places    a tier by a text: file:/var/kv,bytes=50GiB
    door      what doors into other engines share; those of vLLM, SGLang and LMCache

docs/tiers.md is the guide. Needs xxhash: `pip install 'blockyard[tiers]'`.
`RedisTier` needs the extra `redis`, `ObjectTier` `buckets`, `MooncakeTier` `mooncake`, `KVBlocks` `engine`, each when
it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .door import Ended, TierDoor
from .files import FileTier
from .header import BadObject, Header, NameChain, layout_id, object_names
from .offload import Offload
from .peer import PeerTier
from .peer_server import PeerServer
from .places import open_tier, open_tier_use
from .snapshot import Snapshot
from .tier import Cause, First, Job, Outcome, Prefix, Tier, TierStats
from .uses import OffloadReading, TierReading, TierUse
from .worker import PlaceError, WorkingTier

if TYPE_CHECKING:
    from .buckets import ObjectTier
    from .kv_blocks import KVBlocks
    from .mooncake import MooncakeTier
    from .redis import RedisTier
    from .state_objects import StateObjects

from .index import ObjectIndex
from .memory import Blocks, IsDone, States
from .uses import require_write_policy

__all__ = [
    "BadObject",
    "Blocks",
    "Cause",
    "Ended",
    "FileTier",
    "First",
    "Header",
    "IsDone",
    "Job",
    "KVBlocks",
    "MooncakeTier",
    "NameChain",
    "ObjectIndex",
    "ObjectTier",
    "Offload",
    "OffloadReading",
    "Outcome",
    "PeerServer",
    "PeerTier",
    "PlaceError",
    "Prefix",
    "RedisTier",
    "Snapshot",
    "StateObjects",
    "States",
    "Tier",
    "TierDoor",
    "TierReading",
    "TierStats",
    "TierUse",
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
    """Import a tier whose client is an extra when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
