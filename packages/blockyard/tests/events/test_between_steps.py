"""What changes between steps is published at once: no step need follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blockyard import BlockPool, InvalidArgument
from blockyard.events import Mirror, Subscriber

from .published import PROMPT, Publishing, compute, follow, make_cache, tokens_of, until


def tokens_seen(publisher: Any, change: Callable[[], object], before: int) -> int:
    """Return the tokens that a router believes after a change that nobody calls `publish` for."""
    publisher.publish()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == before)
        change()
        assert until(subscriber, lambda: tokens_of(mirror) != before)
        return tokens_of(mirror)


@pytest.mark.parametrize("num_cpu_blocks", [0, 20])
def test_a_reset_of_an_idle_cache_is_published(publishing: Publishing, num_cpu_blocks: int) -> None:
    cache = make_cache(num_cpu_blocks=num_cpu_blocks)
    publisher = publishing(cache)
    cache.free(compute(cache, PROMPT))
    assert tokens_seen(publisher, cache.reset_prefix_cache, 12) == 0


def test_a_smaller_pool_is_published(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    cache.free(compute(cache, PROMPT))
    assert tokens_seen(publisher, lambda: cache.resize(3), 12) == cache.num_cached_tokens([*PROMPT, 0])


@pytest.mark.parametrize("call", ["reset", "reset_prefix_cache", "resize"])
def test_a_pool_alone_publishes_its_resets_and_sizes(publishing: Publishing, call: str) -> None:
    pool = BlockPool(20, 4, enable_kv_cache_events=True)
    publisher = publishing(pool)
    lease = pool.get_new_blocks(3)
    pool.cache_next_blocks(lease, PROMPT, 0)
    pool.free_blocks(lease)
    change = (lambda: pool.resize(2)) if call == "resize" else getattr(pool, call)
    assert tokens_seen(publisher, change, 12) == pool.num_cached_tokens([*PROMPT, 0])


def test_other_changes_are_published_when_asked_for(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    cache.free(compute(cache, PROMPT[:8]))

    def compute_more() -> None:
        cache.free(compute(cache, PROMPT))
        cache.pool.publish_events()

    assert tokens_seen(publisher, compute_more, 8) == 12


def test_a_closed_publisher_leaves_the_callback_free(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    assert cache.pool.on_events is not None
    publisher.close()
    assert cache.pool.on_events is None
    calls: list[int] = []
    cache.pool.on_events = lambda: calls.append(cache.num_cached_blocks)
    with pytest.raises(InvalidArgument, match="on_events is <function"):
        publishing(cache)
    cache.free(compute(cache, PROMPT))
    assert calls == [], "a step is no such change"
    cache.resize(3)
    cache.reset_prefix_cache()
    assert calls == [2, 0]


def test_an_error_of_the_callback_is_a_warning_and_the_change_stands() -> None:
    cache = make_cache()
    cache.pool.on_events = lambda: 1 / 0
    cache.free(compute(cache, PROMPT))
    with pytest.warns(RuntimeWarning, match="on_events raised ZeroDivisionError"):
        cache.reset_prefix_cache()
    assert cache.num_cached_blocks == 0
    with pytest.raises(InvalidArgument, match="on_events is 3; it must be a callable, or None"):
        cache.pool.on_events = 3  # type: ignore[assignment]
    cache.check()
