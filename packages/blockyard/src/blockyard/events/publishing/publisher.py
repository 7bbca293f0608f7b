"""Publishes the contents of a cache as vLLM's KV events over ZeroMQ, from a separate thread."""

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
from ..sockets import bind_socket, zmq
from ..tables.content_table import ContentTable
from .connections import MOST_UNSEEN, Subscriptions
from .feed import Feed, Numbered, replace_placeholders
from .replays import Replays

#: Milliseconds to send the last messages and replays when closing. Not every consumer repeats a request: Dynamo's
#: indexer waits forever, and reads no messages meanwhile.
LAST_MESSAGES_MS = 1000
#: Milliseconds to wait for a further request when closing, if consumers have requested replays before. A consumer on a
#: busy machine was seen to read messages 110 ms late.
LAST_REQUEST_MS = 250
#: Batches queued for the thread before neighbours are merged, so that each is twice as long as the one after it: then
#: few are queued, and together they are at most as long as the cache's contents, past and present.
FEW_WAITING = 32
MAX_REPLAYED = 2**24
_FIRST_NUMBERS = ("clock", "zero")
_NAMES = ("content", "ids")
#: Report every subscription, even one that another consumer already has.
_PUB_OPTIONS: dict[int, int] = {zmq.XPUB_VERBOSER: 1, zmq.RCVHWM: MOST_UNSEEN}
#: A request has 8 bytes, and ZeroMQ queues requests per connection.
_REPLAY_OPTIONS: dict[int, int] = {zmq.MAXMSGSIZE: 2**10, zmq.RCVHWM: 64}
#: Caches with a publisher, and the published contents of each cache, with which its next publisher continues.
_published: WeakSet[KVCacheManager | BlockPool] = WeakSet()
_tables: WeakKeyDictionary[KVCacheManager | BlockPool, ContentTable] = WeakKeyDictionary()


class KVEventPublisher:
    """Publishes the contents of a cache, in vLLM's format, to consumers such as routers.

        publisher = KVEventPublisher(cache, "tcp://127.0.0.1:5557")
        ...after each step, and after frees between steps:
        publisher.publish()
        ...at the end:
        publisher.close()

    `publish` passes arrays to a thread and never waits for a consumer. `reset_prefix_cache` and `resize` of the cache
    are published automatically (`pool.on_events`). Messages are numbered. A consumer that missed messages, started late
    or saw a restart requests a replay, and gets the messages, or a snapshot if they are no longer kept. Without events
    an empty message is sent every `heartbeat` seconds, so that the loss of the last message is noticed.

    Args:
        cache: a manager, or a `BlockPool` without one, made with `enable_kv_cache_events=True`. It can have one
            publisher at a time, and nothing else may call its `take_events`.
        endpoint: endpoint of the PUB socket.
        replay_endpoint: endpoint of the ROUTER socket; None for the next port.
        topic: first frame of each message.
        first_sequence: "clock" starts with the milliseconds since 1970 and random bits, so that a restart looks like a
            gap (for Dynamo's indexer); "zero" starts with 0 and pads snapshots (for llm-d's and SGLang's routers).
        names: meaning of `block_hashes`: "content" for hashes of keys and tokens, equal at all publishers (needed by
            Dynamo, llm-d and AIBrix to follow several), or "ids" for the cache's own numbers, which are enough for a
            `Mirror` and four bytes shorter.
        replayed: messages kept for replays.
        heartbeat: seconds between heartbeats.
        data_parallel_rank: rank in the messages.
        clock: returns seconds since 1970.

    Raises:
        InvalidArgument: a value is outside its limits.
        PublisherError: an endpoint cannot be bound.
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
        options = cache if isinstance(cache, BlockPool) else cache.config.observe
        if not options.enable_kv_cache_events:
            raise InvalidArgument("cache has enable_kv_cache_events=False; make it with enable_kv_cache_events=True")
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
            raise InvalidArgument("cache already has a publisher; close it first")
        self._cache = cache
        self._pool = cache if isinstance(cache, BlockPool) else cache.pool
        callback = self._pool.on_events
        if callback is not None and not isinstance(getattr(callback, "__self__", None), KVEventPublisher):
            raise InvalidArgument(f"pool.on_events is {shown(callback)}; a publisher needs it, so it must be None")
        self._take: Callable[[Any], KVCacheEvents] = type(cache).take_events
        self._topic = require_unicode("topic", require_str("topic", topic)).encode()
        self._heartbeat = heartbeat
        table = _table_of(cache)
        table.name_by(names == "content")
        self._feed = Feed(table, first_sequence == "clock", size, rank, clock)
        self._waiting: deque[KVCacheEvents] = deque()
        #: Events taken from the cache and not yet queued, oldest first; not empty only after an interrupt.
        self._taken: list[KVCacheEvents] = []
        #: The events that the thread is processing.
        self._in_hand: KVCacheEvents | None = None
        self._context = zmq.Context(io_threads=1)
        self._pub, self._router = _bound_sockets(self._context, endpoint, replay_endpoint)
        #: The bound endpoints, with the actual port if it was "*" or 0.
        self.endpoint: str = self._pub.get_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint: str = self._router.get_string(zmq.LAST_ENDPOINT)
        self._replays = Replays(self._router, self._topic, self._feed.replay)
        self._subscriptions = Subscriptions(self._pub, self._topic)
        self._woken = self._wake = -1
        self._is_closing = False
        #: Held while closing; reentrant because a signal handler may close too.
        self._is_free_to_close = threading.RLock()
        self._num_merged = 0
        self._sent_at = time.monotonic()
        #: The error that ended the thread, if any.
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="blockyard-kv-events", daemon=True)
        self._start()

    def _start(self) -> None:
        """Start the thread. On failure close everything: a context with open sockets would never terminate."""
        try:
            self._woken, self._wake = os.pipe()
            os.set_blocking(self._wake, False)
            os.set_blocking(self._woken, False)
            _published.add(self._cache)
            self._thread.start()
            self._pool.on_events = self._publish_between_steps
            self._publish_between_steps()  # the present contents
        except BaseException:
            if not self._thread.is_alive():
                self._close_sockets()
            self.close()
            raise

    # The engine's thread.

    def publish(self) -> None:
        """Queue the cache's events for the thread. O(events). It neither waits nor encodes.

        If the thread cannot keep up, queued batches are merged, which omits blocks that were added and removed in
        between. After `close` events stay in the cache's own log, which is bounded. Raises `PublisherError` once if the
        thread has failed.
        """
        if self.error is not None:
            error, self.error = self.error, None
            raise PublisherError("the thread that publishes KV events has ended") from error
        self._publish_between_steps()

    def _publish_between_steps(self) -> None:
        """Publish the events. An error of the thread is left to the next `publish`."""
        if self._thread.is_alive():
            # One call in C moves the events from the cache's log to the list, so an interrupt loses nothing.
            self._taken.extend(map(self._take, (self._cache,)))
            if self._taken[-1].is_empty:
                self._taken.pop()
            if self._taken:
                self._hand_over()

    def stats(self) -> PublisherStats:
        """Return the counters so far. O(1). For any thread."""
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
        """Queue the events that were taken. Each move is a single call of C code, so an interrupt loses none."""
        taken = self._taken
        while len(self._waiting) >= FEW_WAITING:
            with contextlib.suppress(IndexError):  # the thread was faster
                taken[:0] = starmap(self._waiting.pop, ((),))
            if len(taken) == 1 or num_entries(taken[0]) > 2 * num_entries(taken[1]):
                break
            taken[:2] = (merge_events(taken[0], taken[1]),)
            self._num_merged += 1
        self._waiting.extend(map(taken.pop, [0] * len(taken)))
        self._wake_up()

    def close(self) -> None:
        """Send the remaining messages, answer pending replays, and end the thread and the sockets.

        A second call does nothing.

        It takes 0.25 s if consumers have requested replays, and up to two seconds if one does not read.
        """
        with self._is_free_to_close:
            if self._thread.is_alive():
                if self._taken:
                    self._hand_over()
                self._is_closing = True
                self._wake_up()
                self._thread.join()
                with contextlib.suppress(ConcurrentCall):  # if a signal handler closes during a call
                    self._pool.on_events = None
            if self._wake >= 0:
                self._apply_rest()
                _published.discard(self._cache)
                os.close(self._wake)
                os.close(self._woken)
                self._wake = self._woken = -1

    def _apply_rest(self) -> None:
        """Apply the events that a failed thread has left to the table, for the next publisher."""
        if self._in_hand is not None:
            self._waiting.appendleft(self._in_hand)
            self._in_hand = None
        self._waiting.extend(self._taken)
        self._taken.clear()
        while self._waiting:
            self._feed.apply_if_whole(self._waiting.popleft())

    def __enter__(self) -> KVEventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # it is already awake, or has ended
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
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 65536)
            self._subscriptions.process()
            if self._send_waiting():
                beat = time.monotonic() + self._heartbeat
            elif time.monotonic() >= beat:
                if not self._taken:  # a heartbeat tells consumers that they have all events
                    self._send(self._feed.heartbeat())
                beat = time.monotonic() + self._heartbeat
            self._replays.advance(self._router in ready)
            if is_closing:
                self._finish_replays()
                return

    def _finish_replays(self) -> None:
        """Answer pending replay requests, and those that follow because the last messages showed a consumer a gap."""
        replays = self._replays
        deadline = time.monotonic() + LAST_MESSAGES_MS / 1000
        while time.monotonic() < deadline:
            has_consumers = replays.num_answered + replays.num_given_up > 0
            has_requests = self._router.poll(LAST_REQUEST_MS if has_consumers and not replays.are_waiting else 0)
            if not has_requests and not replays.are_waiting:
                return
            replays.advance(bool(has_requests))

    def _send_waiting(self) -> bool:
        sent = False
        while self._waiting:
            with contextlib.suppress(IndexError):  # the engine's thread is merging it
                self._in_hand = self._waiting.popleft()
            if self._in_hand is not None:
                events = self._feed.apply(self._in_hand)
                self._in_hand = None  # only now, so that events are not lost if processing fails
                if events:
                    self._send(self._feed.number(events))
                    sent = True
        return sent

    def _send(self, message: Numbered) -> None:
        sequence, payload = message
        # A PUB socket drops messages of slow consumers, which see a gap and request a replay.
        self._pub.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload), zmq.DONTWAIT, copy=False)
        self._sent_at = time.monotonic()

    def _close_sockets(self) -> None:
        self._pub.close()
        self._router.close()
        self._context.term()


def require_bindable(endpoint: str, replay_endpoint: str | None = None) -> None:
    """Raise the errors that a publisher would raise for its endpoints, before other work that takes long."""
    with zmq.Context(io_threads=1) as context:
        for socket in _bound_sockets(context, endpoint, replay_endpoint):
            socket.close()


def _bound_sockets(context: Any, endpoint: str, replay_endpoint: str | None) -> tuple[Any, Any]:
    """Return the PUB and the ROUTER socket. On failure close both and terminate the context."""
    sockets: list[Any] = []
    try:
        sockets.append(bind_socket(context, zmq.XPUB, "endpoint", endpoint, LAST_MESSAGES_MS, _PUB_OPTIONS))
        replays_at = replay_endpoint or _next_port(sockets[0].get_string(zmq.LAST_ENDPOINT))
        sockets.append(
            bind_socket(context, zmq.ROUTER, "replay_endpoint", replays_at, LAST_MESSAGES_MS, _REPLAY_OPTIONS)
        )
    except BaseException:
        for socket in sockets:
            socket.close()
        context.term()
        raise
    return sockets[0], sockets[1]


def _table_of(cache: KVCacheManager | BlockPool) -> ContentTable:
    """Return the table of published contents.

    Raises `PublisherError` if an earlier publisher failed while updating it.
    """
    table = _tables.get(cache)
    if table is None:
        # Of a pool only the block size is used.
        config = CacheConfig(2, cache.block_size) if isinstance(cache, BlockPool) else cache.config
        table = _tables[cache] = ContentTable(config)
    if not table.is_whole:
        table.apply(replace_placeholders(cache.take_events()))
        if not table.is_whole:
            raise PublisherError(
                "events were lost when the last publisher of this cache failed; call reset_prefix_cache() first"
            )
    return table


def _next_port(endpoint: str) -> str:
    """Return the endpoint with the next TCP port, or another path."""
    base, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{base}{colon}{int(port) + 1}"
    return f"{endpoint}-replay"


def num_entries(changes: KVCacheEvents) -> int:
    """Return the number of entries. O(pools)."""
    roots = len(changes.new_roots) + len(changes.lost_roots)
    return roots + len(changes.contents) + sum(len(pool.ids) for pool in changes.pools)


def merge_events(first: KVCacheEvents, second: KVCacheEvents) -> KVCacheEvents:
    """Return one batch of events for two consecutive ones, without entries that cancel out. O(n log n).

    Additions are at most the present contents, removals at most the earlier contents.
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
    """Return which entries remain, and which of the additions.

    An id is added and removed in turn, so an even number of its entries cancels out; of an odd number the first
    remains.
    """
    entries = np.concatenate((first, second))
    _, begins, counts = np.unique(np.abs(entries), return_index=True, return_counts=True)
    kept = np.zeros(len(entries), dtype=np.bool_)
    kept[begins[counts % 2 == 1]] = True
    return kept, kept[entries > 0]
