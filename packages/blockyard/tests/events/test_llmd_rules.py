"""A consumer that follows the rules of llm-d's subscriber, as written down: what it holds is what the cache holds.

It asks for a replay from 0 when it begins; wants every number from the one it asked for, without holes; asks from the
last number plus one after a gap; and takes a number that is not above the last for a publisher that began anew: it
clears, and asks from 0.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgspec

from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.events.publishing.feed import Feed
from blockyard.events.tables.content_table import ContentTable
from blockyard.events.wire import BlockRemoved, BlockStored, decode_batch
from blockyard_testing.seeds import run_seed
from blockyard_testing.told import contents_of


class RuleFollower:
    """Block hashes by their parents and tokens."""

    def __init__(self) -> None:
        self.last = -1
        self.blocks: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def clear(self) -> None:
        self.last = -1
        self.blocks.clear()

    def live(self, number: int, payload: bytes, feed: Feed) -> None:
        if number <= self.last:
            self.clear()
        if number != self.last + 1 or self.last < 0:
            self.ask(feed)
        else:
            self.take(number, payload)

    def ask(self, feed: Feed) -> None:
        for number, payload in feed.replay(self.last + 1):
            assert number == self.last + 1, "a hole in a replay"
            self.take(number, payload)

    def take(self, number: int, payload: bytes) -> None:
        self.last = number
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored):
                parent = event.parent_block_hash
                token_ids = msgspec.msgpack.decode(event.token_ids)
                for place, name in enumerate(msgspec.msgpack.decode(event.block_hashes)):
                    tokens = token_ids[place * event.block_size : (place + 1) * event.block_size]
                    self.blocks[name] = (parent, tuple(tokens))
                    parent = name
            elif isinstance(event, BlockRemoved):
                for name in msgspec.msgpack.decode(event.block_hashes):
                    del self.blocks[name]
            else:
                self.blocks.clear()


def new_cache() -> KVCacheManager:
    return KVCacheManager(
        CacheConfig(20, 2, max_model_len=40, watermark=0.0, observe=ObserveConfig(enable_kv_cache_events=True))
    )


def held(cache: KVCacheManager) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What prompts can hit: contents behind a root."""
    known = contents_of(cache._parts.token_blocks.index, 2)
    found: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for name in sorted(known):
        parent, tokens = known[name]
        if parent in found or (parent not in known and parent == cache._parts.token_blocks.index.known_root(())):
            found[name] = (parent if parent in found else None, tokens)
    return found


def test_a_replay_never_fills_up_more_than_the_limit() -> None:
    cache = new_cache()
    feed = Feed(ContentTable(cache.config), False, 3, None, lambda: 1000.0)
    feed.most_padded = 10
    epochs = set()
    for _ in range(35):
        number, payload = feed.heartbeat()
        epochs.add(decode_batch(payload).epoch)
        assert number < 10
        replay = list(feed.replay(0))
        assert [each for each, _ in replay] == list(range(number + 1))
    assert len(epochs) == 4
    begun = feed.replay(0)
    next(begun)
    while feed.heartbeat()[0] != 0:
        pass
    assert list(begun) == [], "numbers of a life that is over"


def test_follower_matches_the_cache() -> None:
    draw = random.Random(run_seed())
    counts: Counter[str] = Counter()
    for _ in range(20):
        now = 1000.0

        def clock() -> float:
            nonlocal now
            now += 0.01
            return now

        cache, follower = new_cache(), RuleFollower()
        replayed = draw.choice((2, 10, 1000))
        feed = Feed(ContentTable(cache.config), False, replayed, None, clock)
        feed.most_padded = draw.choice((7, 30, 1000))
        for _ in range(60):
            prompt = [draw.randint(1, 2) for _ in range(draw.randint(1, 16))]
            seq = cache.allocate(prompt)
            cache.reserve([seq])
            cache.commit([seq], cache.num_tokens(seq) - cache.num_computed_tokens(seq))
            cache.free(seq)
            if draw.random() < 0.05:
                cache.reset_prefix_cache()
            message = feed.make_message(cache.take_events())
            counts["anew"] += message is not None and message[0] == 0
            if message is not None and draw.random() < 0.8:
                follower.live(*message, feed)
            counts["lost"] += message is not None and follower.last < message[0]
            if draw.random() < 0.05:
                counts["restarts"] += 1
                cache = new_cache()
                feed = Feed(ContentTable(cache.config), False, replayed, None, clock)
                feed.most_padded = draw.choice((7, 30, 1000))
                follower.live(*feed.heartbeat(), feed)
            if draw.random() < 0.2:
                follower.live(*feed.heartbeat(), feed)
                assert follower.blocks == held(cache)
                counts["compared"] += 1
    assert all(counts[name] > 10 for name in ("lost", "restarts", "compared", "anew")), counts
