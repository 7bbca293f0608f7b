"""KV events: what a cache holds, told to routers and other consumers, and kept by them (extra `events`)."""

from .following.mirror import Match, Mirror
from .following.stream import Trust
from .following.subscriber import Subscriber
from .publishing.publisher import KVEventPublisher

__all__ = ["KVEventPublisher", "Match", "Mirror", "Subscriber", "Trust"]
