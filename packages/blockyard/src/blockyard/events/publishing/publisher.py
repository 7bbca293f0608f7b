"""Tells others what a cache holds: vLLM's KV events over ZeroMQ, from a thread of its own."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import starmap
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt

from ...arguments import require_int, require_str, require_unicode, shown
from ...config import CacheConfig
from ...core.manager import KVCacheManager
from ...core.pools.block_pool import BlockPool
from ...errors import ConcurrentCall, InvalidArgument, PublisherError
from ...kv_events import BlockChanges, KVCacheEvents, PublisherStats
from ..sockets import bound, zmq
from ..tables.content_table import ContentTable
from .connections import MOST_UNSEEN, Subscriptions
from .feed import Feed, Numbered, without_placeholders
from .replays import Replays

#: Milliseconds that the last messages get to leave at the end, and the answers to replays. Not every consumer that
#: asked and hears nothing asks again: Dynamo's indexer waits forever, and reads no messages meanwhile.
LAST_MESSAGES_MS = 1000
#: Milliseconds without a request after which no consumer is expected to ask any more, where one has asked before; a
#: consumer on a busy machine was seen to read messages 110 ms late.
LAST_REQUEST_MS = 250
#: Hand-overs that wait for the thread as they are. After that neighbours are merged, so that each is twice as long as
#: the one after it: few wait, and together they are no longer than what the cache holds and held.
FEW_WAITING = 32
MAX_REPLAYED = 2**24
_FIRST_NUMBERS = ("clock", "zero")
_NAMES = ("content", "ids")
#: Every subscription is told of, also one that another consumer has already.
_PUB_OPTIONS: dict[int, int] = {zmq.XPUB_VERBOSER: 1, zmq.RCVHWM: MOST_UNSEEN}
#: A request is 8 bytes, and ZeroMQ keeps those that wait of each connection.
_REPLAY_OPTIONS: dict[int, int] = {zmq.MAXMSGSIZE: 2**10, zmq.RCVHWM: 64}
#: Caches that have a publisher, and what each cache has told so far: its next publisher goes on from there.
_published: WeakSet[KVCacheManager | BlockPool] = WeakSet()
_tables: WeakKeyDictionary[KVCacheManager | BlockPool, ContentTable] = WeakKeyDictionary()


class KVEventPublisher:
    """Publishes what `cache` holds, as vLLM does, to consumers such as routers.

        publisher = KVEventPublisher(cache, "tcp://127.0.0.1:5557")
        ...after each step, and after frees between steps:
        publisher.publish()
        ...at the end:
        publisher.close()

    `publish` hands arrays to a thread and returns; it never waits for a consumer. `reset_prefix_cache` and `resize`
    of the cache are published by themselves (`pool.on_events`). Messages are numbered. A consumer
    that missed some, began late or saw a restart asks the replay socket, and gets the messages, or a snapshot where
    they are gone. While nothing happens, an empty message goes out every `heartbeat` seconds, so that a lost last
    message is noticed.

    cache: a manager, or a `BlockPool` that is used alone, made with `enable_kv_cache_events=True`; it has one publisher
    at a time, and nothing else calls its `take_events`. endpoint: of the PUB socket. replay_endpoint: of the ROUTER
    socket; None for the next port. topic: the first frame. first_sequence: "clock" begins with the milliseconds since
    1970 and random bits, so that a restart is a gap forwards (right for Dynamo's indexer); "zero" begins with 0 and
    pads snapshots (right for llm-d's router, and SGLang's). names: what `block_hashes` are: "content" for hashes of
    keys and tokens, which equal contents share at all publishers (Dynamo, llm-d and AIBrix need that where they follow
    several), or "ids" for the cache's own numbers, enough for a `Mirror` and four bytes shorter. replayed: messages
    that are kept for replays. heartbeat: seconds. data_parallel_rank: the rank that messages name. clock: gives
    seconds since 1970.

    Raises `InvalidArgument`, and `PublisherError` when an endpoint cannot be bound.
    """

    def __init__(
        self,
        cache: KVCacheManager | BlockPool,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        first_sequence: str = "clock",
        names: str = "content",
        replayed: int = 10_000,
        heartbeat: float = 1.0,
        data_parallel_rank: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not isinstance(cache, (KVCacheManager, BlockPool)):
            raise InvalidArgument(f"cache is {shown(cache)}; it must be a KVCacheManager or a BlockPool")
        if not _has_events(cache):
            raise InvalidArgument("cache has enable_kv_cache_events=False; events need True")
        if first_sequence not in _FIRST_NUMBERS:
            raise InvalidArgument(f"first_sequence is {shown(first_sequence)}; it must be 'clock' or 'zero'")
        if names not in _NAMES:
            raise InvalidArgument(f"names is {shown(names)}; it must be 'content' or 'ids'")
        if not isinstance(heartbeat, (int, float)) or not 0 < heartbeat <= 3600:
            raise InvalidArgument(f"heartbeat is {shown(heartbeat)}; it must be above 0 and at most 3600 seconds")
        rank = data_parallel_rank
        if rank is not None:
            rank = require_int("data_parallel_rank", rank, 0, 65535)
        size = require_int("replayed", replayed, 1, MAX_REPLAYED)
        if cache in _published:
            raise InvalidArgument("cache has a publisher already; close that one first")
        self._cache = cache
        self._pool = cache if isinstance(cache, BlockPool) else cache.pool
        callback = self._pool.on_events
        if callback is not None and not isinstance(getattr(callback, "__self__", None), KVEventPublisher):
            raise InvalidArgument(f"pool.on_events is {shown(callback)}; a publisher needs it: set it to None")
        self._take: Callable[[Any], KVCacheEvents] = type(cache).take_events
        self._topic = require_unicode("topic", require_str("topic", topic)).encode()
        self._heartbeat = heartbeat
        table = _table_of(cache)
        table.name_by(names == "content")
        self._feed = Feed(table, first_sequence == "clock", size, rank, clock)
        self._waiting: deque[KVCacheEvents] = deque()
        #: What was taken from the cache and is not waiting yet, oldest first: some are left after an interrupt.
        self._taken: list[KVCacheEvents] = []
        #: What the thread is taking in.
        self._in_hand: KVCacheEvents | None = None
        self._context = zmq.Context(io_threads=1)
        self._pub, self._router = _bound_sockets(self._context, endpoint, replay_endpoint)
        #: Where the sockets are bound, with the port that a "*" or 0 stood for.
        self.endpoint: str = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str = self._router.get_string(zmq.LAST_ENDPOINT)
        self._replays = Replays(self._router, self._topic, self._feed.replay)
        self._subscriptions = Subscriptions(self._pub, self._topic)
        self._woken = self._wake = -1
        self._is_closing = False
        #: One thread closes at a time; a signal's handler may close meanwhile.
        self._is_free_to_close = threading.RLock()
        self._num_merged = 0
        self._sent_at = time.monotonic()
        #: What ended the thread, if something did.
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="blockyard-kv-events", daemon=True)
        self._start()

    def _start(self) -> None:
        """Start the thread. Where that cannot be, nothing is open: a context of open sockets would never end."""
        try:
            self._woken, self._wake = os.pipe()
            os.set_blocking(self._wake, False)
            os.set_blocking(self._woken, False)
            _published.add(self._cache)
            self._thread.start()
            self._pool.on_events = self._publish_between_steps
            self._publish_between_steps()  # what the cache holds already
        except BaseException:
            if not self._thread.is_alive():
                self._close_sockets()
            self.close()
            raise

    # The engine's thread.

    def publish(self) -> None:
        """Hand over what the cache has to tell. O(what happened); it neither waits nor formats.

        While the thread is far behind, hand-overs are merged: what came and went in between is left out. After `close`
        events stay in the cache's own log, which is bounded, and nothing is lost. Raises what ended the thread, once.
        """
        if self.error is not None:
            error, self.error = self.error, None
            raise PublisherError("the thread that publishes KV events has ended") from error
        self._publish_between_steps()

    def _publish_between_steps(self) -> None:
        """Publish, and leave what ended the thread to the next `publish`."""
        if self._thread.is_alive():
            # In C from the cache's log into the list: an interrupt comes before or after, and loses nothing.
            self._taken.extend(map(self._take, (self._cache,)))
            if self._taken[-1].is_empty:
                self._taken.pop()
            if self._taken:
                self._hand_over()

    def stats(self) -> PublisherStats:
        """Counts what it has done so far. Any thread may ask. O(1)."""
        feed, replays = self._feed, self._replays
        return PublisherStats(
            is_running=self._thread.is_alive(),
            seconds_since_message=time.monotonic() - self._sent_at,
            num_messages=feed.num_messages,
            num_bytes=feed.num_bytes,
            num_heartbeats=feed.num_heartbeats,
            num_waiting=len(self._waiting) + len(self._taken) + (self._in_hand is not None),
            num_merged=self._num_merged,
            num_replays=replays.num_answered,
            num_given_up=replays.num_given_up,
            num_refused=replays.num_refused,
            num_snapshots=feed.num_snapshots,
            snapshot_bytes=feed.snapshot_bytes,
            num_cut=self._subscriptions.num_cut,
        )

    def _hand_over(self) -> None:
        """Let the thread have what was taken. Each move is one call in C, so an interrupt loses nothing."""
        taken = self._taken
        while len(self._waiting) >= FEW_WAITING:
            with contextlib.suppress(IndexError):  # the thread was faster
                taken[:0] = starmap(self._waiting.pop, ((),))
            if len(taken) == 1 or num_entries(taken[0]) > 2 * num_entries(taken[1]):
                break
            taken[:2] = (merged(taken[0], taken[1]),)
            self._num_merged += 1
        self._waiting.extend(map(taken.pop, [0] * len(taken)))
        self._wake_up()

    def close(self) -> None:
        """Send what is left, answer who asks, and end the thread and the sockets. A second call does nothing.

        It takes 0.25 s where consumers have asked for replays, and up to two seconds where one reads nothing.
        """
        with self._is_free_to_close:
            if self._thread.is_alive():
                if self._taken:
                    self._hand_over()
                self._is_closing = True
                self._wake_up()
                self._thread.join()
                with contextlib.suppress(ConcurrentCall):  # a signal's handler closes in the middle of a call
                    self._pool.on_events = None
            if self._wake >= 0:
                self._take_in_rest()
                _published.discard(self._cache)
                os.close(self._wake)
                os.close(self._woken)
                self._wake = self._woken = -1

    def _take_in_rest(self) -> None:
        """Keep what a thread that broke has left: the next publisher tells of it."""
        if self._in_hand is not None:
            self._waiting.appendleft(self._in_hand)
            self._in_hand = None
        self._waiting.extend(self._taken)
        self._taken.clear()
        while self._waiting:
            self._feed.take_in_if_whole(self._waiting.popleft())

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is awake already, or at its end
            os.write(self._wake, b"\0")

    # The thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.error = error
        finally:
            self._close_sockets()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._pub, zmq.POLLIN)
        beat = time.monotonic() + self._heartbeat
        while True:
            pause = 0.0 if self._replays.are_waiting else max(0.0, beat - time.monotonic())
            ready = dict(poller.poll(math.ceil(1000 * min(pause, self._heartbeat))))
            is_closing = self._is_closing
            if self._woken in ready:
                self._drain_wakes()
            self._subscriptions.go_on()
            if self._send_waiting():
                beat = time.monotonic() + self._heartbeat
            elif time.monotonic() >= beat:
                if not self._taken:  # who hears a heartbeat believes to have heard all
                    self._send(self._feed.beat())
                beat = time.monotonic() + self._heartbeat
            self._replays.go_on(self._router in ready)
            if is_closing:
                self._finish_replays()
                return

    def _finish_replays(self) -> None:
        """Answer who has asked or is just asking: the last messages may have shown a gap to a consumer."""
        replays = self._replays
        deadline = time.monotonic() + LAST_MESSAGES_MS / 1000
        while time.monotonic() < deadline:
            has_consumers = replays.num_answered + replays.num_given_up > 0
            has_requests = self._router.poll(LAST_REQUEST_MS if has_consumers and not replays.are_waiting else 0)
            if not has_requests and not replays.are_waiting:
                return
            replays.go_on(bool(has_requests))

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 65536)

    def _send_waiting(self) -> bool:
        sent = False
        while self._waiting:
            with contextlib.suppress(IndexError):  # the engine's thread is merging it with another one
                self._in_hand = self._waiting.popleft()
            if self._in_hand is not None:
                events = self._feed.take_in(self._in_hand)
                self._in_hand = None  # now, not before: what could not be taken in is not lost
                if events:
                    self._send(self._feed.number(events))
                    sent = True
        return sent

    def _send(self, message: Numbered) -> None:
        sequence, payload = message
        # A PUB socket drops what a slow consumer does not read; that one sees a gap and asks for a replay.
        self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.DONTWAIT, copy=False)
        self._sent_at = time.monotonic()

    def _close_sockets(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()


def require_bindable(endpoint: str, replay_endpoint: str | None = None) -> None:
    """Raise what a publisher would raise for its endpoints now: asked before something that takes long."""
    with zmq.Context(io_threads=1) as context:
        for socket in _bound_sockets(context, endpoint, replay_endpoint):
            socket.close()


def _bound_sockets(context: Any, endpoint: str, replay_endpoint: str | None) -> tuple[Any, Any]:
    """Return the PUB and the ROUTER socket; where one cannot be bound, neither is, and the context has ended."""
    sockets: list[Any] = []
    try:
        sockets.append(bound(context, zmq.XPUB, "endpoint", endpoint, LAST_MESSAGES_MS, _PUB_OPTIONS))
        replays_at = replay_endpoint or _next_port(sockets[0].get_string(zmq.LAST_ENDPOINT))
        sockets.append(bound(context, zmq.ROUTER, "replay_endpoint", replays_at, LAST_MESSAGES_MS, _REPLAY_OPTIONS))
    except BaseException:
        for socket in sockets:
            socket.close()
        context.term()
        raise
    return sockets[0], sockets[1]


def _has_events(cache: KVCacheManager | BlockPool) -> bool:
    return cache.enable_kv_cache_events if isinstance(cache, BlockPool) else cache.config.observe.enable_kv_cache_events


def _config_of(cache: KVCacheManager | BlockPool) -> CacheConfig:
    """A pool has no config of its own: what counts here is the size of its blocks."""
    return CacheConfig(2, cache.block_size) if isinstance(cache, BlockPool) else cache.config


def _table_of(cache: KVCacheManager | BlockPool) -> ContentTable:
    """What the cache has told its earlier publishers. Raises `PublisherError` where one of them broke on the way."""
    table = _tables.get(cache)
    if table is None:
        table = _tables[cache] = ContentTable(_config_of(cache))
    if not table.is_whole:
        table.apply(without_placeholders(cache.take_events()))
        if not table.is_whole:
            raise PublisherError(
                "what the cache told was lost with its last publisher; reset_prefix_cache() begins anew"
            )
    return table


def _next_port(endpoint: str) -> str:
    """Return the port behind a TCP endpoint's, or another name for a path."""
    base, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{base}{colon}{int(port) + 1}"
    return f"{endpoint}-replay"


def num_entries(changes: KVCacheEvents) -> int:
    """Counts what came and went. O(pools)."""
    roots = len(changes.new_roots) + len(changes.lost_roots)
    return roots + len(changes.contents) + sum(len(pool.ids) for pool in changes.pools)


def merged(first: KVCacheEvents, second: KVCacheEvents) -> KVCacheEvents:
    """Merges what a cache told in two readings into one, and leaves out what came and went in between.

    O(n log n) for n entries. What came is at most what the cache holds now, and what went what it held before.
    """
    if second.cleared:
        return second
    made, lost = {root for root, _ in first.new_roots}, set(second.lost_roots)
    kept, used = _net(first.contents, second.contents)
    return KVCacheEvents(
        first.cleared,
        (*(item for item in first.new_roots if item[0] not in lost), *second.new_roots),
        (*first.lost_roots, *(root for root in second.lost_roots if root not in made)),
        np.concatenate((first.contents, second.contents))[kept],
        np.concatenate((first.parents, second.parents))[used],
        np.concatenate((first.token_ids, second.token_ids))[used],
        tuple(map(_merged_pool, first.pools, second.pools)),
    )


def _merged_pool(first: BlockChanges, second: BlockChanges) -> BlockChanges:
    kept, used = _net(first.ids, second.ids)
    return BlockChanges(
        np.concatenate((first.ids, second.ids))[kept],
        np.concatenate((first.contents, second.contents))[used],
        np.concatenate((first.groups, second.groups))[used],
    )


def _net(
    first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Keeps the first entry of each id that has an odd number of them; also returns which of those that came are kept.

    Each id comes and goes in turns, so an even number of entries leaves things as they were.
    """
    entries = np.concatenate((first, second))
    _, begins, counts = np.unique(np.abs(entries), return_index=True, return_counts=True)
    kept = np.zeros(len(entries), dtype=np.bool_)
    kept[begins[counts % 2 == 1]] = True
    return kept, kept[entries > 0]
