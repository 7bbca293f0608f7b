"""A content that goes and comes back under its id: what follows it is told of again, under the keys of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheConfig, CacheSalt, KVCacheManager, LoRA, ObserveConfig, Span
from blockyard.events.following.mirror import Mirror
from blockyard.events.following.stream import Trust
from blockyard.events.publishing.feed import Feed
from blockyard.events.tables.content_table import ContentTable
from blockyard.events.wire import BlockStored, decode_batch, read_keys

KEYS = (LoRA("adapter"), CacheSalt("salt"))


def make_cache(num_blocks: int = 8) -> KVCacheManager:
    return KVCacheManager(
        CacheConfig(
            num_blocks,
            2,
            max_model_len=64,
            watermark=0.0,
            observe=ObserveConfig(enable_kv_cache_events=True),
            partial_hits=False,
        )
    )


def compute(cache: KVCacheManager, tokens: list[int], keys: tuple[Any, ...] = ()) -> int:
    seq = cache.allocate(tokens, extra_keys=keys)
    missing = len(tokens) - cache.num_computed_tokens(seq)
    cache.reserve([seq], missing)
    cache.commit([seq], missing)
    return seq


def make_feed(cache: KVCacheManager) -> Feed:
    return Feed(ContentTable(cache.config), True, 1000, None, lambda: 1000.0)


class Told:
    """A mirror that hears all."""

    def __init__(self, cache: KVCacheManager) -> None:
        self.cache = cache
        self.feed = make_feed(cache)
        self.mirror = Mirror(hash_seed=1)
        self.mirror.receive_live("worker", *self.feed.heartbeat())
        for message in self.feed.replay(0):
            self.mirror.receive_replayed("worker", *message)
        self.mirror.end_replay("worker")

    def tell(self) -> None:
        message = self.feed.make_message(self.cache.take_events())
        if message is not None:
            self.mirror.receive_live("worker", *message)
        assert self.mirror.trust("worker") is Trust.LIVE


@pytest.mark.parametrize("told_before", [False, True])
@pytest.mark.parametrize("told_between", [False, True])
def test_descendants_of_a_returning_content_are_published_again(told_before: bool, told_between: bool) -> None:
    cache = make_cache()
    told = Told(cache)
    first = compute(cache, [1, 2, 3, 4, 9])
    if told_before:
        told.tell()
    both = cache.hold_cached([1, 2, 3, 4])
    second = cache.pool.touch(both, start=1)
    cache.pool.free_blocks(both)
    cache.free(first)
    again = cache.allocate([1, 2])  # its last block is to be computed again, and is equal to the first one
    cache.pool.free_blocks(cache.pool.get_new_blocks(cache.num_free_blocks))
    if told_between:
        told.tell()
        assert not told.mirror.match([1, 2, 3, 4])
    cache.reserve([again], 2)
    cache.commit([again], 2)
    told.tell()
    assert cache.num_cached_tokens([1, 2, 3, 4, 5]) == 4
    assert told.mirror.match([1, 2, 3, 4])["worker"].num_tokens == 4
    cache.pool.free_blocks(second)


def test_blocks_behind_a_span_name_the_adapter_whenever_they_are_told_of() -> None:
    cache = make_cache()
    feed = make_feed(cache)
    seq = cache.allocate([1, 2, 3, 4, 5, 6, 7], extra_keys=(*KEYS, Span("image", 2, 2)))
    events = []
    for _ in range(3):
        cache.reserve([seq], 2)
        cache.commit([seq], 2)
        message = feed.make_message(cache.take_events())
        assert message is not None
        events += decode_batch(message[1]).events
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [event.lora_name for event in stored] == ["adapter"] * 3
    assert [read_keys("extra_keys", event.extra_keys) for event in stored] == [
        [["adapter", "salt"]],
        [["adapter", ["image", 0]]],
        [["adapter"]],
    ]


def test_spans_that_were_forgotten_take_no_memory() -> None:
    cache = make_cache()
    feed = make_feed(cache)
    system = compute(cache, [1, 2, 3])
    for number in range(100):
        cache.free(compute(cache, [1, 2, 3, 4], (Span(str(number), 2, 2),)))
        feed.make_message(cache.take_events())
    assert feed._table.rows.num_rows <= 2 * cache.config.num_blocks + 2
    cache.free(system)
