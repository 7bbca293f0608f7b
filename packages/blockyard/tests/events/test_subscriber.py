"""A subscriber: what it asks for, how long it waits, whom it follows."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
import zmq

from blockyard import InvalidArgument
from blockyard.events import Mirror, PublisherError, Subscriber, Trust
from blockyard_testing.patience import PATIENCE_SECONDS

from .published import PROMPT, Publishing, compute, follow, make_cache, tokens_of, until


@pytest.mark.parametrize("timeout", [-1, "x", None, float("nan"), 10**9, True])
def test_a_bad_timeout_is_refused(timeout: Any) -> None:
    with Subscriber(Mirror()) as subscriber, pytest.raises(InvalidArgument, match="timeout is"):
        subscriber.poll(timeout)


def test_requests_to_a_publisher_with_unreadable_snapshots_become_rarer() -> None:
    context = zmq.Context()
    live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, replay)]
    asked = 0
    try:
        with Subscriber(Mirror()) as subscriber:
            subscriber.follow("worker", *(f"tcp://127.0.0.1:{port}" for port in ports))
            began = time.monotonic()
            while (waited := time.monotonic() - began) < 2 or (asked < 3 and waited < PATIENCE_SECONDS):
                subscriber.poll(0.01)
                while replay.poll(0):
                    identity = replay.recv_multipart()[0]
                    asked += 1
                    replay.send_multipart((identity, b"", b"", bytes(8), b"no batch"))
                    replay.send_multipart((identity, b"", b"", b"\xff" * 8, b""))
    finally:
        context.destroy(linger=0)
    assert 3 <= asked <= 8


def test_an_answer_is_dropped_when_a_live_message_cannot_be_read() -> None:
    """The rest of it may be of an earlier life; what is asked next has a connection of its own."""
    context = zmq.Context()
    live, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (live, replay)]
    mirror, asked = Mirror(), []

    def answer(identity: bytes, number: int, *events: Any) -> None:
        payload = msgspec.msgpack.encode([float(number), list(events), 0])
        replay.send_multipart((identity, b"", b"", number.to_bytes(8, "big"), payload))

    try:
        with Subscriber(mirror) as subscriber:
            subscriber.follow("worker", *(f"tcp://127.0.0.1:{port}" for port in ports))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(asked) < 2 and time.monotonic() < deadline:
                subscriber.poll(0.01)
                if asked and not mirror.is_replay_void("worker"):
                    live.send_multipart((b"", (1).to_bytes(8, "big"), b"no batch"))
                while replay.poll(0):
                    identity = replay.recv_multipart()[0]
                    if identity not in asked:
                        asked.append(identity)
                        answer(identity, 0)
            assert len(asked) == 2
            answer(asked[0], 1, {"type": "AllBlocksCleared"})
            replay.send_multipart((asked[0], b"", b"", b"\xff" * 8, b""))
            for _ in range(20):
                subscriber.poll(0.01)
            assert mirror.trust("worker") is not Trust.LIVE
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("timeout", [-1, "x", None, float("nan"), 10**9, True])
def test_a_bad_time_to_wait_is_refused(timeout: Any) -> None:
    with Subscriber(Mirror()) as subscriber, pytest.raises(InvalidArgument, match="timeout is"):
        subscriber.wait_until_live(timeout)


def test_a_closed_subscriber_follows_nobody() -> None:
    subscriber = Subscriber(Mirror())
    subscriber.close()
    with pytest.raises(PublisherError, match="closed"):
        subscriber.follow("worker", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")


def test_a_thousand_workers_are_followed_by_one() -> None:
    with Subscriber(Mirror()) as subscriber:
        for number in range(1000):
            subscriber.follow(f"worker-{number}", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
        assert subscriber.poll() == 0


WITHOUT_FILES = """
import resource, sys
from blockyard import CacheConfig, KVCacheManager, ObserveConfig
from blockyard.errors import PublisherError
from blockyard.events import KVEventPublisher, Mirror, Subscriber, Trust
from blockyard_testing.patience import PATIENCE_SECONDS

cache = KVCacheManager(CacheConfig(num_blocks=100, observe=ObserveConfig(enable_kv_cache_events=True)))
publisher = KVEventPublisher(cache, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", heartbeat=0.05)
subscriber = Subscriber(Mirror())
subscriber.follow("worker", publisher.endpoint, publisher.replay_endpoint)
assert subscriber.wait_until_live(PATIENCE_SECONDS)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
try:
    subscriber.follow("other", publisher.endpoint, publisher.replay_endpoint)
except PublisherError as error:
    assert "ulimit -n" in str(error), error
else:
    sys.exit("followed without a file")
source = subscriber._sources["worker"]
subscriber.mirror.receive_live("worker", 10**6, b"what cannot be read")
for _ in range(20):
    subscriber.poll(0.05)
assert subscriber.mirror.trust("worker") is not Trust.LIVE
assert not source.replay.closed
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
subscriber.follow("other", publisher.endpoint, publisher.replay_endpoint)
assert subscriber.wait_until_live(PATIENCE_SECONDS)
subscriber.close()
publisher.close()
"""


def test_without_a_file_for_a_socket_a_worker_is_asked_later() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=4 * PATIENCE_SECONDS
    )
    assert found.returncode == 0, found.stderr
    assert "no replay can be requested from worker" in found.stderr


def test_a_publisher_that_ended_is_silent(publishing: Publishing) -> None:
    cache = make_cache()
    publisher = publishing(cache, heartbeat=0.05)
    with Subscriber(Mirror()) as subscriber:
        follow(subscriber, publisher)
        assert until(subscriber, lambda: subscriber.mirror.trust("worker") is Trust.LIVE)
        began = time.monotonic()
        assert subscriber.poll(PATIENCE_SECONDS) > 0, "a heartbeat"
        assert subscriber.seconds_since_message("worker") <= time.monotonic() - began
        publisher.close()
        assert until(subscriber, lambda: subscriber.seconds_since_message("worker") > 0.3)
        with pytest.raises(InvalidArgument, match="not followed"):
            subscriber.seconds_since_message("other")


def test_a_worker_that_is_followed_no_more_is_forgotten(publishing: Publishing) -> None:
    cache = make_cache()
    publisher, mirror = publishing(cache), Mirror()
    with Subscriber(mirror) as subscriber:
        follow(subscriber, publisher)
        compute(cache, PROMPT)
        publisher.publish()
        assert until(subscriber, lambda: tokens_of(mirror) == len(PROMPT))
        subscriber.unfollow("worker")
        assert mirror.match(PROMPT) == {}
        assert mirror.trust("worker") is Trust.UNTRUSTED
        assert mirror.num_holdings() == 0
        assert subscriber.poll(0.2) == 0, "heartbeats of a worker that nobody follows"
        for ask in (subscriber.unfollow, subscriber.seconds_since_message):
            with pytest.raises(InvalidArgument, match="worker is 'worker'; it is not followed"):
                ask("worker")
        follow(subscriber, publisher)
        assert until(subscriber, lambda: tokens_of(mirror) == len(PROMPT))
        assert subscriber.seconds_since_message("worker") < PATIENCE_SECONDS
