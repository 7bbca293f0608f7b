"""Consumers that ask for much and read nothing: they take no memory without bound, and others get what they need."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable

import pytest
import zmq

from blockyard.events import KVEventPublisher, Mirror, Subscriber
from blockyard.events.publishing import replays
from blockyard.events.wire import END_SEQUENCE
from blockyard_testing.patience import PATIENCE_SECONDS

from .published import PROMPT, compute, follow, make_cache, tokens_of, until


def test_subscriber_of_many_topics_is_disconnected(
    publishing: Callable[..., KVEventPublisher],
) -> None:
    """ZeroMQ would keep them all: a kilobyte and more for each."""
    cache = make_cache(num_blocks=600, max_model_len=40)
    publisher = publishing(cache, topic="kv@pod-1@a-model")
    mirror = Mirror()
    with zmq.Context() as context, context.socket(zmq.XSUB) as hostile, Subscriber(mirror) as subscriber:
        subscriber.follow("worker", publisher.endpoint, publisher.replay_endpoint, "kv@pod-1@a-model")
        assert subscriber.wait_until_live(10.0)
        hostile.setsockopt(zmq.LINGER, 0)
        hostile.setsockopt(zmq.SNDHWM, 0)
        hostile.connect(publisher.endpoint)
        deadline = time.monotonic() + 20.0
        for number in itertools.count():
            hostile.send(b"\1" + number.to_bytes(40, "big"))
            if number % 100 == 0:
                subscriber.poll(0.01)
                if publisher.stats().num_cut >= 3 or time.monotonic() > deadline:
                    break
        assert publisher.stats().num_cut >= 3
        answered = publisher.stats().num_replays
        seq = compute(cache, PROMPT)
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == 12)
        assert publisher.stats().num_replays == answered  # it never lost its own connection
        cache.free(seq)


def test_a_consumer_may_change_its_topics_as_often_as_it_likes(publishing: Callable[..., KVEventPublisher]) -> None:
    publisher = publishing(make_cache(), heartbeat=0.01)
    with zmq.Context() as context, context.socket(zmq.SUB) as consumer:
        consumer.setsockopt(zmq.LINGER, 0)
        consumer.connect(publisher.endpoint)
        for number in range(500):
            consumer.setsockopt(zmq.SUBSCRIBE, b"topic-%d" % number)
            if number >= 60:
                consumer.setsockopt(zmq.UNSUBSCRIBE, b"topic-%d" % (number - 60))
        consumer.setsockopt(zmq.SUBSCRIBE, b"")
        assert consumer.poll(10_000)
    assert publisher.stats().num_cut == 0


def test_few_long_topics_are_too_many_as_well(publishing: Callable[..., KVEventPublisher]) -> None:
    publisher = publishing(make_cache(), topic="t" * 9000)
    with zmq.Context() as context, context.socket(zmq.SUB) as honest, context.socket(zmq.SUB) as hostile:
        for consumer in (honest, hostile):
            consumer.setsockopt(zmq.LINGER, 0)
            consumer.connect(publisher.endpoint)
        honest.setsockopt(zmq.SUBSCRIBE, b"t" * 9000)
        assert honest.poll(10_000)
        for number in range(5):
            hostile.setsockopt(zmq.SUBSCRIBE, bytes([number]) * 4000)
        deadline = time.monotonic() + 10.0
        while publisher.stats().num_cut == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert publisher.stats().num_cut > 0


def test_consumers_that_never_read_their_snapshots_keep_no_place_for_ever(
    publishing: Callable[..., KVEventPublisher],
) -> None:
    """Eight of them held all the places there are for long messages, for as long as they stayed."""
    cache = make_cache(num_blocks=70_000, max_model_len=300_000)
    cache.free(compute(cache, list(range(270_000))))
    publisher = publishing(cache)
    publisher.publish()
    mirror = Mirror()
    with zmq.Context() as context, contextlib.ExitStack() as held:
        for _ in range(8):
            stuck = held.enter_context(context.socket(zmq.DEALER))
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                stuck.setsockopt(option, value)
            stuck.connect(publisher.replay_endpoint)
            for _ in range(12):
                stuck.send_multipart([b"", bytes(8)])
        deadline = time.monotonic() + 20.0
        while publisher.stats().num_snapshots < 16 and time.monotonic() < deadline:  # what the network holds is read
            time.sleep(0.01)
        with Subscriber(mirror) as subscriber:
            follow(subscriber, publisher)
            assert subscriber.wait_until_live(20.0)
        assert mirror.match(range(270_000))["worker"].num_tokens == 270_000


def test_consumers_that_read_nothing_keep_a_slot_ever_shorter() -> None:
    haste = replays.Haste()
    kept = []
    for _ in range(12):  # of a hundred that never read, eight at a time
        kept.append(haste.seconds)
        haste.note_cut()
    assert sum(kept) < 3
    assert min(kept) == replays.LEAST_HASTE
    assert haste.least_bytes / haste.seconds == pytest.approx(replays.LEAST_BYTES / replays.HASTE, rel=0.01)
    for _ in range(6):
        haste.note_read()
    assert haste.seconds == replays.HASTE


def test_a_consumer_that_reads_gets_its_snapshot_among_many_that_do_not(
    publishing: Callable[..., KVEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as many as there are places; each cut makes the next come sooner."""
    monkeypatch.setattr(replays, "HASTE", 0.5)
    cache = make_cache(num_blocks=70_000, max_model_len=300_000)
    cache.free(compute(cache, list(range(270_000))))
    publisher = publishing(cache)
    publisher.publish()
    with zmq.Context() as context, contextlib.ExitStack() as held, Subscriber(Mirror()) as subscriber:
        for _ in range(24):
            stuck = held.enter_context(context.socket(zmq.DEALER))
            for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                stuck.setsockopt(option, value)
            stuck.connect(publisher.replay_endpoint)
            for _ in range(12):
                stuck.send_multipart([b"", bytes(8)])
        deadline = time.monotonic() + 20.0
        while publisher.stats().num_given_up < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        follow(subscriber, publisher)
        assert subscriber.wait_until_live(PATIENCE_SECONDS)
        assert publisher._replays._haste.seconds < replays.HASTE


def test_abandoned_replay_gets_an_end_mark(
    publishing: Callable[..., KVEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end without messages: Dynamo's indexer waits for it without a limit."""
    monkeypatch.setattr(replays, "MOST_LONG", 0)
    monkeypatch.setattr(replays, "PATIENCE", 0.2)
    publisher = publishing(make_cache())
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(publisher.replay_endpoint)
        asking.send_multipart([b"", bytes(8)])
        assert asking.poll(10_000)
        assert asking.recv_multipart()[-2] == END_SEQUENCE
    assert publisher.stats().num_given_up == 1
