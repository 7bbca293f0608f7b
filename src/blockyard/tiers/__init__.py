"""Tiers keep objects below the GPU's memory, in files, servers or buckets: a load is exact, or a miss with its cause.

    from blockyard.tiers import FileTier, Job, layout_id, object_names

Read it in this order:

    tier      the interface: five calls, jobs, outcomes, causes
    header    what each object says of itself, and its name
    worker    queues, threads, circuits: what all tiers share
    index     which objects are known, and which one goes next
    files     a folder; nothing to start

docs/tiers.md is the guide. Needs cbor2 and xxhash: `pip install 'blockyard[tiers]'`.
"""

from .files import FileTier
from .header import BadObject, Header, layout_id, object_names
from .tier import Cause, Job, Outcome, Prefix, Tier, TierStats
from .worker import PlaceError, WorkingTier

__all__ = [
    "BadObject",
    "Cause",
    "FileTier",
    "Header",
    "Job",
    "Outcome",
    "PlaceError",
    "Prefix",
    "Tier",
    "TierStats",
    "WorkingTier",
    "layout_id",
    "object_names",
]
