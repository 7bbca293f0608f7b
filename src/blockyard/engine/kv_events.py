"""The publisher of an engine's cache, if it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..arguments import shown
from ..core.manager import KVCacheManager
from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ..events import KVEventPublisher


def require_bindable_events(kv_events: object) -> None:
    """Raise for endpoints that a publisher cannot bind, where that can be told before a model is loaded.

    Anything else that is wrong with `kv_events` is told by `publisher_of`.
    """
    given = {"endpoint": kv_events} if isinstance(kv_events, str) else kv_events
    if isinstance(given, Mapping) and isinstance(given.get("endpoint"), str):
        from ..events.publishing.publisher import require_bindable

        require_bindable(given["endpoint"], given.get("replay_endpoint"))


def publisher_of(cache: KVCacheManager, kv_events: object) -> KVEventPublisher | None:
    """kv_events: an endpoint, or a dict of the publisher's arguments; None for no publisher.

    Raises `InvalidArgument`, `PublisherError` for an endpoint that cannot be bound, `MissingExtra` without pyzmq.
    """
    if kv_events is None:
        return None
    from ..events import KVEventPublisher

    if isinstance(kv_events, str):
        return KVEventPublisher(cache, kv_events)
    if not isinstance(kv_events, Mapping):
        raise InvalidArgument(f"kv_events is {shown(kv_events)}; it must be an endpoint or a dict")
    options: dict[str, Any] = dict(kv_events)
    try:
        return KVEventPublisher(cache, **options)
    except TypeError as error:
        raise InvalidArgument(f"kv_events is {shown(options)}: {error}") from error
