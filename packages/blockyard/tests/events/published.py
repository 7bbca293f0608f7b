"""A cache that publishes, and a subscriber that reads until something has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from blockyard import KVCacheManager
from blockyard.config import cache_config
from blockyard.events import KVEventPublisher, Mirror, Subscriber
from blockyard_testing.patience import PATIENCE_SECONDS

Publishing = Callable[..., KVEventPublisher]
PROMPT = list(range(1, 13))


def make_cache(**settings: Any) -> KVCacheManager:
    given = {"num_blocks": 20, "block_size": 4, "enable_kv_cache_events": True} | settings
    return KVCacheManager(cache_config(**given))


def compute(cache: KVCacheManager, tokens: list[int]) -> int:
    seq = cache.allocate(tokens)
    missing = len(tokens) - cache.num_computed_tokens(seq)
    cache.reserve([seq], missing)
    cache.commit([seq], missing)
    return seq


def follow(subscriber: Subscriber, publisher: KVEventPublisher) -> None:
    subscriber.follow("worker", publisher.endpoint, publisher.replay_endpoint)


def until(subscriber: Subscriber, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        subscriber.poll(0.02)
    return True


def tokens_of(mirror: Mirror) -> int:
    found = mirror.match(PROMPT).get("worker")
    return found.num_tokens if found is not None else 0
