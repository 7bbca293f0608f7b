"""KV events: publish the contents of a cache to routers and other consumers, and follow them.

Publishing and following need the extra `events`, imported on first use. `blockyard.events.tables` only needs numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import PublisherError
from ..kv_events import BlockChanges, KVCacheEvents, PublisherStats

if TYPE_CHECKING:
    from .following.matches import Match, Matches
    from .following.mirror import Mirror
    from .following.stream import Trust
    from .following.subscriber import Subscriber
    from .publishing.publisher import KVEventPublisher, require_bindable
    from .sockets import require_endpoint

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
    "require_bindable",
    "require_endpoint",
]

_LATER = {
    "KVEventPublisher": ".publishing.publisher",
    "Match": ".following.matches",
    "Matches": ".following.matches",
    "Mirror": ".following.mirror",
    "Subscriber": ".following.subscriber",
    "Trust": ".following.stream",
    "require_bindable": ".publishing.publisher",
    "require_endpoint": ".sockets",
}


def __getattr__(name: str) -> object:
    """Import a name that needs the extra `events` on first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name], __name__), name)
