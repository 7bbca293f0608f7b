"""Messages that are long, and so made in turns between which other threads run."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard import CacheConfig, KVCacheManager
from blockyard.config import cache_config
from blockyard.events import Mirror
from blockyard.events.publishing import feed as feeds
from blockyard.events.publishing.feed import Feed, LongBatch, WorkTurns
from blockyard.events.tables.content_table import CONTENTS_A_GO, ROWS_A_GO, ContentTable
from blockyard.events.tables.table_checks import check_contents
from blockyard.events.wire import Batch, BlockRemoved, decode_batch, pack_list

NUM_CONTENTS = 2 * ROWS_A_GO + 100


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every chance to rest is taken, and noted."""
    taken: list[float] = []
    monkeypatch.setattr(feeds, "TURN", 0.0)
    monkeypatch.setattr(feeds, "sleep", taken.append)
    return taken


def full_cache(**settings: Any) -> KVCacheManager:
    config = cache_config(
        NUM_CONTENTS + 2, 1, max_model_len=NUM_CONTENTS, watermark=0.0, enable_kv_cache_events=True, **settings
    )
    cache = KVCacheManager(config)
    seq = cache.allocate(prompt())
    cache.reserve([seq], NUM_CONTENTS)
    cache.commit([seq], NUM_CONTENTS)
    cache.free(seq)
    return cache


def prompt() -> list[int]:
    return [number * 7919 % 100_003 for number in range(NUM_CONTENTS)]


def feed_of(cache: KVCacheManager, *, replayed: int = 10) -> Feed:
    return Feed(ContentTable(cache.config), True, replayed, None, lambda: 1000.0)


def followed(*messages: Any) -> Mirror:
    mirror = Mirror(hash_seed=1)
    for sequence, payload in messages:
        mirror.receive_replayed("worker", sequence, payload)
    mirror.end_replay("worker")
    return mirror


def events_of(count: int) -> list[Any]:
    names = [b"\x91\xce" + number.to_bytes(4, "big") for number in range(count)]
    return [BlockRemoved(pack_list(name), "GPU", number) for number, name in enumerate(names)]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 3000])
@pytest.mark.parametrize("epoch", [None, 5])
def test_message_written_in_pieces_is_valid(count: int, epoch: int | None) -> None:
    batch = Batch(1.5, events_of(count), 3, epoch)
    message = LongBatch(Batch(1.5, [], 3, epoch), 1, WorkTurns())  # it grows, several times
    for event in batch.events:
        message.add(event)
    payload = message.finish()
    assert payload.readonly
    assert decode_batch(payload) == batch


def test_a_large_hand_over_and_its_snapshot_are_made_in_turns(rests: list[float]) -> None:
    cache = full_cache()
    feed = feed_of(cache)
    message = feed.make_message(cache.take_events())
    assert len(rests) >= NUM_CONTENTS // CONTENTS_A_GO
    check_contents(feed._table)
    assert message is not None
    rests.clear()
    (snapshot,) = feed.replay(0)
    assert len(rests) >= NUM_CONTENTS // 512
    cleared = decode_batch(snapshot[1])
    assert len(cleared.events) == 1 + len(decode_batch(message[1]).events) > feeds.FEW_EVENTS
    assert followed(snapshot).match(prompt())["worker"].num_tokens == NUM_CONTENTS


def test_a_live_message_of_many_events_is_made_in_turns(rests: list[float]) -> None:
    cache = full_cache()
    feed = feed_of(cache, replayed=2)
    beat = feed.heartbeat()
    message = feed.make_message(cache.take_events())
    assert message is not None
    assert isinstance(message[1], memoryview)
    assert list(feed.replay(message[0])) == [message]
    assert feed.num_bytes == len(beat[1]) + len(message[1])
    (snapshot,) = feed.replay(0)
    assert followed((snapshot[0], snapshot[1])).match(prompt())["worker"].num_tokens == NUM_CONTENTS


def test_a_walk_past_contents_that_are_not_there_has_turns(rests: list[float]) -> None:
    """Nothing is on the CPU: a walk over all contents finds no event there."""
    cache = full_cache(num_cpu_blocks=10)
    feed = feed_of(cache)
    feed.make_message(cache.take_events())
    parts = list(feed._table.snapshot())
    assert [part for part in parts if not part]
    (snapshot,) = feed.replay(0)
    assert followed(snapshot).match(prompt())["worker"].num_gpu_tokens == NUM_CONTENTS


def test_rows_are_forgotten_by_a_reset_and_taken_again() -> None:
    cache = full_cache()
    feed = feed_of(cache)
    feed.make_message(cache.take_events())
    cache.reset_prefix_cache()
    feed.make_message(cache.take_events())
    check_contents(feed._table)
    assert feed._table.rows.num_rows <= 1
    (snapshot,) = feed.replay(0)
    assert not followed(snapshot).match(prompt())
    seq = cache.allocate(prompt()[:600])
    cache.reserve([seq], 600)
    cache.commit([seq], 600)
    feed.make_message(cache.take_events())
    check_contents(feed._table)
    (snapshot,) = feed.replay(0)
    assert followed(snapshot).match(prompt())["worker"].num_tokens == 600


@pytest.mark.parametrize("block_size", [16, 256, 4096])
def test_room_at_the_start_is_bounded_by_bytes(block_size: int) -> None:
    """A row has its tokens: of a million rows of 4,096 that was 16 GiB."""
    table = ContentTable(CacheConfig(num_blocks=2**20, block_size=block_size))
    assert 2**26 < table.num_bytes() < 2**28
