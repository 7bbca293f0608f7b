"""A publisher and subscribers over real sockets, on loopback."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from blockyard import BlockPool, InvalidArgument, Span
from blockyard.events import KVEventPublisher, Mirror, PublisherError, Subscriber, Trust
from blockyard.events.publishing import publisher as publishers
from blockyard_testing.interrupter import Interrupter
from blockyard_testing.patience import PATIENCE_SECONDS, wait_until

from .published import PROMPT, Publishing, compute, follow, make_cache, tokens_of, until

#: Requests of which some are right, from one who never reads an answer.
HOSTILE = ([b"", bytes(8)], [b"x"], [b"", b"", b"", bytes(8)], [bytes(8)], [b"", b"a" * 900])


@pytest.mark.parametrize("first_sequence", ["clock", "zero"])
def test_a_late_consumer_gets_all_and_then_what_follows(publishing: Publishing, first_sequence: str) -> None:
    cache = make_cache()
    publisher = publishing(cache, first_sequence=first_sequence)
    seq = compute(cache, PROMPT[:8])
    publisher.publish()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert subscriber.wait_until_live(PATIENCE_SECONDS)
        assert tokens_of(mirror) == 8
        cache.free(seq)
        compute(cache, PROMPT)
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
        cache.reset_prefix_cache()
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == 0)


def test_a_pool_alone_is_published(publishing: Publishing) -> None:
    """A placeholder under a span is told as the last of all tokens."""
    pool = BlockPool(20, 4, enable_kv_cache_events=True)
    publisher = publishing(pool)
    lease = pool.get_new_blocks(4)
    pool.cache_next_blocks(lease, PROMPT[:8], lease.num_cached_blocks)
    publisher.publish()
    mirror = Mirror()
    picture = Span("cat", 9, 2)
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == 8)
        pool.cache_next_blocks(lease, [9, -1, -1, 12], lease.num_cached_blocks, extra_keys=(picture,))
        pool.cache_next_blocks(lease, [13, 14, 15, 16], lease.num_cached_blocks, extra_keys=(picture,))
        publisher.publish()
        told = [*PROMPT[:8], 9, 2**31 - 1, 2**31 - 1, 12, 13, 14, 15, 16]

        def found() -> int:
            match = mirror.match(told, (picture,)).get("worker")
            return 0 if match is None else match.num_tokens

        assert until(subscriber, lambda: found() == 16)
        pool.uncache([2])
        publisher.publish()
        assert until(subscriber, lambda: found() == 4)
        pool.cache_next_blocks(lease, PROMPT[4:8], 1)
        publisher.publish()
        assert until(subscriber, lambda: found() == 8), "what follows hangs on the old content"
        pool.cache_next_blocks(lease, [9, -1, -1, 12, 13, 14, 15, 16], lease.num_cached_blocks, extra_keys=(picture,))
        publisher.publish()
        assert until(subscriber, lambda: found() == 16)
        pool.reset_prefix_cache()
        publisher.publish()
        assert until(subscriber, lambda: found() == 0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BlockPool(4), "cache has enable_kv_cache_events=False; make it with enable_kv_cache_events=True"),
        (lambda: make_cache().pool, "it must be a KVCacheManager or a BlockPool"),
    ],
)
def test_pools_that_are_not_published(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        KVEventPublisher(make())


def test_a_restart_is_noticed(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    compute(cache, PROMPT)
    publisher.publish()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
        publisher.close()
        second = make_cache()
        publisher = publishing(second, endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        compute(second, PROMPT[:4])
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == 4 and mirror.trust("worker") is Trust.LIVE)


def test_error_for_a_port_in_use_is_one_sentence(publishing: Publishing) -> None:
    publisher = publishing(make_cache())
    with pytest.raises(PublisherError, match=r"endpoint is 'tcp://.*'; it cannot be bound: Address already in use"):
        publishing(make_cache(), endpoint=publisher.endpoint)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache": "x"}, "cache is 'x'; it must be a KVCacheManager or a BlockPool"),
        ({"cache": make_cache(enable_kv_cache_events=False)}, "make it with enable_kv_cache_events=True"),
        ({"first_sequence": "one"}, "first_sequence is 'one'; it must be 'clock' or 'zero'"),
        ({"heartbeat": 0}, "heartbeat is 0"),
        ({"heartbeat": "x"}, "heartbeat is 'x'"),
        ({"topic": "\ud800"}, "topic holds"),
        ({"endpoint": "\ud800"}, "endpoint holds"),
        ({"endpoint": "inproc://x"}, "endpoint is 'inproc://x'; no other process can connect to inproc://"),
        ({"endpoint": "tcp://127.0.0.1:" + "9" * 5000}, r"endpoint is 'tcp://.*\.\.\.; it must end with a port"),
        ({"endpoint": "tcp://127.0.0.1:\u0663"}, "it must end with a port from 0 to 65535"),
        ({"replayed": 0}, "replayed is 0"),
        ({"data_parallel_rank": -1}, "data_parallel_rank is -1"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        KVEventPublisher(**({"cache": make_cache(), "endpoint": "tcp://127.0.0.1:*"} | options))


@pytest.mark.parametrize("bad", ["nowhere", 5])
@pytest.mark.parametrize("endpoints", [0, 1])
def test_a_bad_endpoint_leaves_nothing_that_closing_waits_for(bad: Any, endpoints: int) -> None:
    given = ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"]
    given[endpoints] = bad
    with pytest.raises((PublisherError, InvalidArgument)), Subscriber(Mirror()) as subscriber:
        subscriber.follow("worker", *given)


def test_a_publisher_that_needs_long_for_a_snapshot_is_asked_less_and_less(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked anew each time that patience ends, it would make one after another, each for a connection that is gone."""
    monkeypatch.setattr("blockyard.events.following.subscriber.REPLAY_PATIENCE", 0.05)
    cache = make_cache()
    publisher = publishing(cache)
    compute(cache, PROMPT)
    publisher.publish()
    table = publisher._feed._table
    snapshot = table.snapshot

    def slow() -> Any:
        time.sleep(0.3)
        return snapshot()

    monkeypatch.setattr(type(table), "snapshot", lambda _: slow())
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == 12)


def test_hostile_requests_and_a_consumer_that_does_not_read_keep_nobody_waiting(publishing: Publishing) -> None:
    cache = make_cache(num_blocks=2000, max_model_len=8000)
    publisher = publishing(cache)
    compute(cache, list(range(7000)))
    publisher.publish()
    context = zmq.Context()
    hostile = context.socket(zmq.DEALER)
    hostile.setsockopt(zmq.LINGER, 0)
    hostile.setsockopt(zmq.RCVHWM, 1)
    hostile.connect(publisher.replay_endpoint)
    for number in range(300):
        hostile.send_multipart(HOSTILE[number % len(HOSTILE)])
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: mirror.trust("worker") is Trust.LIVE)
        assert mirror.match(range(7000))["worker"].num_tokens == 7000
    hostile.close()
    context.term()


def test_publishing_waits_for_nobody_and_loses_nothing(publishing: Publishing) -> None:
    """The thread is held up; meanwhile hundreds of steps go by, and afterwards a consumer has all."""
    cache = make_cache(num_blocks=600, max_model_len=40)
    publisher = publishing(cache)
    gate = threading.Event()
    apply = publisher._feed.apply
    publisher._feed.apply = lambda changes: gate.wait(PATIENCE_SECONDS) and apply(changes)  # type: ignore[method-assign]
    for number in range(300):
        cache.free(compute(cache, [number] * 4))
        publisher.publish()
    assert len(publisher._waiting) <= 64
    gate.set()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)

        def has_all() -> bool:
            publisher.publish()
            return all(mirror.match([number] * 4) for number in range(300))

        assert until(subscriber, has_all)


@pytest.mark.parametrize("num_steps", [64, 65, 300])
def test_the_end_of_a_burst_is_sent_without_another_step(publishing: Publishing, num_steps: int) -> None:
    """The engine is idle afterwards: nobody calls `publish` any more."""
    cache = make_cache(num_blocks=600, max_model_len=40)
    publisher = publishing(cache)
    gate = threading.Event()
    apply = publisher._feed.apply
    publisher._feed.apply = lambda changes: gate.wait(PATIENCE_SECONDS) and apply(changes)  # type: ignore[method-assign]
    for number in range(num_steps):
        cache.free(compute(cache, [number] * 4))
        publisher.publish()
        assert publisher.stats().num_waiting <= 64
    gate.set()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: all(mirror.match([number] * 4) for number in range(num_steps)))


def test_no_heartbeat_says_that_all_is_sent_while_something_is_not(publishing: Publishing) -> None:
    """An interrupt may leave events between the cache and the thread until the next call."""
    cache = make_cache()
    publisher = publishing(cache, heartbeat=0.01)
    compute(cache, PROMPT)
    publisher._taken.append(cache.take_events())  # as an interrupt would leave it
    wait_until(lambda: publisher.stats().num_waiting == 1)
    before = publisher.stats().num_heartbeats
    time.sleep(0.1)
    assert publisher.stats().num_heartbeats <= before + 1  # one may have been on its way
    publisher.publish()
    wait_until(lambda: publisher.stats().num_heartbeats > before + 1)
    assert publisher.stats().num_waiting == 0


def test_unencodable_keys_do_not_end_the_publisher(publishing: Publishing) -> None:
    """Consumers are not told of blocks whose keys have no encoding, and of all others."""
    cache = make_cache()
    publisher = publishing(cache)
    nothing = cache.take_events()
    roots, names = ((1000, (("salt", "\ud800"),)),), np.array([1001], dtype=np.int64)
    tokens = np.array([[1, 2, 3, 4]], dtype=np.int32)
    changes = dataclasses.replace(nothing, new_roots=roots, contents=names, parents=names - 1, token_ids=tokens)
    publisher._waiting.append(changes)
    publisher._wake_up()
    compute(cache, PROMPT)
    publisher.publish()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
    assert publisher.stats().is_running


def test_failed_message_shows_as_a_gap(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache, heartbeat=3600)
    mirror = Mirror()
    feed, payload = publisher._feed, publisher._feed._payload
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        compute(cache, PROMPT[:4])
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == 4)

        def failing(_: Any) -> Any:
            feed._payload = payload  # type: ignore[method-assign]
            raise MemoryError

        feed._payload = failing  # type: ignore[method-assign]
        compute(cache, PROMPT)
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == 12 and mirror.trust("worker") is Trust.LIVE)


def test_an_answer_that_cannot_be_made_ends_no_publisher(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    broken = [MemoryError(), MemoryError()]
    feed, encoded = publisher._feed, publisher._feed._snapshot

    def failing() -> Any:
        if broken:
            raise broken.pop()
        return encoded()

    feed._snapshot = failing  # type: ignore[method-assign]
    compute(cache, PROMPT)
    publisher.publish()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
    assert not broken
    assert publisher.stats().num_given_up == 2


def test_closing_twice_is_nothing_and_what_was_published_is_out(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers, "LAST_MESSAGES_MS", 1000 * PATIENCE_SECONDS)
    cache = make_cache()
    publisher = publishing(cache)
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert subscriber.wait_until_live(PATIENCE_SECONDS)
        assert subscriber.poll(PATIENCE_SECONDS) > 0, "a heartbeat: live messages reach it, not only its replay"
        compute(cache, PROMPT)
        publisher.publish()
        publisher.close()
        publisher.close()
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
    publisher.publish()


def test_pending_replay_is_answered_on_close(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's indexer waits for an answer forever, and takes in nothing meanwhile."""
    monkeypatch.setattr(publishers, "LAST_MESSAGES_MS", 1000 * PATIENCE_SECONDS)
    cache = make_cache()
    publisher = publishing(cache)
    beat, is_held, goes_on = publisher._feed.heartbeat, threading.Event(), threading.Event()

    def held() -> Any:
        is_held.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return beat()

    monkeypatch.setattr(publisher._feed, "heartbeat", held)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(publisher.replay_endpoint)
        assert is_held.wait(PATIENCE_SECONDS)  # it has looked for requests, and does so once more before it ends
        closing = threading.Thread(target=publisher.close)
        closing.start()
        wait_until(lambda: publisher._is_closing)
        asking.send_multipart([b"", bytes(8)])
        assert publisher._router.poll(1000 * PATIENCE_SECONDS)  # the thread is held, and does not use the socket
        goes_on.set()
        assert asking.poll(1000 * PATIENCE_SECONDS)
        assert len(asking.recv_multipart()[-1]) > 0
        assert asking.poll(1000 * PATIENCE_SECONDS)
        assert asking.recv_multipart()[-2] == (-1).to_bytes(8, "big", signed=True)
        closing.join()


def test_replay_requested_during_close_is_answered(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that is behind sees the gap in the last messages, and asks, when the publisher is on its way out."""
    monkeypatch.setattr(publishers, "LAST_MESSAGES_MS", 1000 * PATIENCE_SECONDS)
    publisher = publishing(make_cache())
    poll, waits = publisher._router.poll, [threading.Event()]

    def waiting(milliseconds: float) -> Any:
        """For the last request it waits as long as this test may need, and for another one not at all."""
        if milliseconds == publishers.LAST_REQUEST_MS and waits:
            waits.pop().set()
            return poll(1000 * PATIENCE_SECONDS)
        return poll(0)

    has_begun_to_wait = waits[0]
    monkeypatch.setattr(publisher._router, "poll", waiting)
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(publisher.replay_endpoint)
        for is_closing in (False, True):
            if is_closing:
                closing = threading.Thread(target=publisher.close)
                closing.start()
                assert has_begun_to_wait.wait(PATIENCE_SECONDS)
            asking.send_multipart([b"", bytes(8)])
            while asking.poll(1000 * PATIENCE_SECONDS) and asking.recv_multipart()[-2] != (-1).to_bytes(
                8, "big", signed=True
            ):
                pass
        closing.join()
    assert publisher.stats().num_replays == 2


def test_failed_thread_is_reported(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)

    def broken(changes: Any) -> None:
        raise ZeroDivisionError("by a test")

    publisher._feed.apply = broken  # type: ignore[method-assign]
    compute(cache, PROMPT)
    publisher.publish()
    publisher._thread.join(PATIENCE_SECONDS)
    with pytest.raises(PublisherError, match="the thread that publishes KV events has ended"):
        publisher.publish()


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_is_lost_with_a_publisher_that_is_closed_or_broke(publishing: Publishing, breaks: bool) -> None:
    """What is published afterwards, and what the thread had not taken in, is for the next one to tell."""
    cache = make_cache()
    is_broken = threading.Event()

    def clock() -> float:
        if is_broken.is_set():
            raise ZeroDivisionError("by a test")
        return time.time()

    first = publishing(cache, clock=clock, heartbeat=60)
    compute(cache, PROMPT[:4])
    first.publish()
    if breaks:
        wait_until(lambda: first.stats().num_messages == 1)
        is_broken.set()
        compute(cache, [20] * 4)
        first.publish()
        first._thread.join(PATIENCE_SECONDS)
        compute(cache, [30] * 4)
        first._waiting.append(cache.take_events())  # as if it had been handed over just before
        with pytest.raises(PublisherError, match="has ended"):
            first.publish()
    else:
        first.close()
    compute(cache, PROMPT)
    first.publish()
    first.close()
    mirror, second = Mirror(), publishing(cache)
    second.publish()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, second)
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
    if breaks:
        assert all(mirror.match([number] * 4) for number in (20, 30))
    first.close()  # once more: the cache's new publisher stays its only one
    with pytest.raises(InvalidArgument, match="cache already has a publisher"):
        publishing(cache)


@pytest.mark.parametrize(("owner", "name"), [(threading.Thread, "start"), (publishers.os, "pipe")])
def test_a_publisher_that_cannot_start_leaves_nothing_open(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("by a test")

    cache = make_cache()
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind("tcp://127.0.0.1:*")
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, refused)
        with pytest.raises(OSError, match="by a test"):
            publishing(cache, endpoint=endpoint)
    assert publishing(cache, endpoint=endpoint).endpoint == endpoint


def test_several_threads_may_close(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = publishing(make_cache())
    closed, close = [], publishers.os.close

    def slowly(end: int) -> None:
        closed.append(end)
        time.sleep(0.01)
        close(end)

    monkeypatch.setattr(publishers.os, "close", slowly)
    threads = [threading.Thread(target=publisher.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(closed) == 2


def test_consumer_that_never_reads_gets_few_snapshots(publishing: Publishing) -> None:
    """Each is memory of its own until it is read: a socket takes a thousand of them."""
    cache = make_cache(num_blocks=70_000, max_model_len=300_000)
    cache.free(compute(cache, list(range(270_000))))
    publisher = publishing(cache)
    publisher.publish()
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.setsockopt(zmq.RCVHWM, 1)
        asking.connect(publisher.replay_endpoint)
        for _ in range(60):
            asking.send_multipart([b"", bytes(8)])
            time.sleep(0.02)
        wait_until(lambda: publisher.stats().snapshot_bytes > 0)
        made = publisher.stats()
        assert made.num_snapshots < 20
        assert made.snapshot_bytes > 2**20 * made.num_snapshots
        with Subscriber(Mirror()) as subscriber:  # others are answered
            follow(subscriber, publisher)
            assert subscriber.wait_until_live(PATIENCE_SECONDS)


def test_a_request_of_many_bytes_is_not_taken_in(publishing: Publishing) -> None:
    publisher = publishing(make_cache())
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(publisher.replay_endpoint)
        asking.send_multipart([b"", bytes(2**17)])
        asking.send_multipart([b"", bytes(8)])  # on the next connection, or lost with the first
        time.sleep(0.3)
        assert publisher.stats().num_refused == 0
        mirror = Mirror()
        with Subscriber(mirror) as subscriber:
            follow(subscriber, publisher)
            assert subscriber.wait_until_live(PATIENCE_SECONDS)


def test_the_next_publisher_of_a_cache_has_what_it_told_the_last_one(publishing: Publishing) -> None:
    cache = make_cache()
    first = publishing(cache)
    compute(cache, PROMPT)
    first.publish()
    with pytest.raises(InvalidArgument, match="cache already has a publisher; close it first"):
        publishing(cache)
    first.close()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publishing(cache))
        assert until(subscriber, lambda: tokens_of(mirror) == 12)


def test_after_one_that_broke_the_cache_is_reset_first(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    compute(cache, PROMPT)
    publisher._waiting.append(dataclasses.replace(cache.take_events(), token_ids=np.empty((0, 4), np.int32)))
    publisher._wake_up()
    publisher._thread.join(PATIENCE_SECONDS)
    publisher.close()
    with pytest.raises(PublisherError, match=r"reset_prefix_cache\(\) first"):
        publishing(cache)
    cache.reset_prefix_cache()
    compute(cache, PROMPT[:4])
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publishing(cache))
        assert until(subscriber, lambda: tokens_of(mirror) == 4)


@pytest.mark.parametrize("line", range(8))
def test_an_interrupt_while_events_are_handed_over_loses_none(publishing: Publishing, line: int) -> None:
    cache = make_cache()
    publisher = publishing(cache)
    cache.free(compute(cache, PROMPT))
    Interrupter("publisher.py", line + 1).run(publisher.publish)
    cache.reset_prefix_cache()
    compute(cache, [9] * 5)
    publisher.publish()
    mirror = Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: mirror.trust("worker") is Trust.LIVE and mirror.match([9] * 4) != {})
    assert mirror.match(PROMPT) == {}
