"""KV events: what a cache holds, told to routers and other consumers, and kept by them (extra `events`)."""

from ..errors import PublisherError
from ..kv_events import BlockChanges, KVCacheEvents, PublisherStats
from .following.matches import Match, Matches
from .following.mirror import Mirror
from .following.stream import Trust
from .following.subscriber import Subscriber
from .publishing.publisher import KVEventPublisher

__all__ = [
    "BlockChanges",
    "KVCacheEvents",
    "KVEventPublisher",
    "Match",
    "Matches",
    "Mirror",
    "PublisherError",
    "PublisherStats",
    "Subscriber",
    "Trust",
]
