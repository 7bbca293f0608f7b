"""Publishers that are closed when their test has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from blockyard import KVCacheManager
from blockyard.events import KVEventPublisher


@pytest.fixture
def publishing() -> Iterator[Callable[..., KVEventPublisher]]:
    made = []

    def publish(cache: KVCacheManager, **options: Any) -> KVEventPublisher:
        options = {"heartbeat": 0.05, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"} | options
        made.append(KVEventPublisher(cache, **options))
        return made[-1]

    yield publish
    for publisher in made:
        publisher.close()
