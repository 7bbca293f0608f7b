"""The pool's own events through vLLM's scheduler: real sockets, and a mirror that must equal the cache."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq

from blockyard.events import Mirror, Subscriber
from blockyard_vllm.scheduler import address_of

from .engine import Engine, request_of
from .test_programs import Program

ANY_PORT = "tcp://127.0.0.1:*"
SECONDS = 20.0


@pytest.fixture
def subscriber() -> Iterator[Subscriber]:
    with Subscriber(Mirror()) as made:
        yield made


def follow(subscriber: Subscriber, engine: Engine) -> None:
    """Follow the events from now on, after asking for the current contents."""
    publisher = engine.scheduler.pool_events.publisher
    subscriber.follow("worker", publisher.endpoint, publisher.replay_endpoint)


def cached_tokens(engine: Engine, prompt: list[int]) -> int:
    """Return the tokens that the pool itself finds, last full block included."""
    return int(engine.pool.find_cached_blocks(prompt).num_tokens)


def require_equal(subscriber: Subscriber, engine: Engine, prompts: list[list[int]]) -> None:
    """Check that within seconds the mirror has as much of each prompt as the pool."""
    expected = [cached_tokens(engine, prompt) for prompt in prompts]
    end = time.monotonic() + SECONDS
    while True:
        subscriber.poll(0.05)
        matches = [subscriber.mirror.match(prompt) for prompt in prompts]
        found = [match["worker"].num_tokens if "worker" in match else 0 for match in matches]
        if found == expected and subscriber.wait_until_live(0.0):
            return
        assert time.monotonic() < end, (found, expected)


def run_some(engine: Engine, prompts: list[list[int]], count: int, source: random.Random) -> None:
    """Requests for some of the prompts, to their ends."""
    for number in range(count):
        engine.add(request_of(f"{count}-{number}-{source.random()}", list(source.choice(prompts)), 2))
        if number % 3 == 0:
            engine.drain()
    engine.drain()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_mirror_equals_the_pool(seed: int, asynchronous: bool, subscriber: Subscriber) -> None:
    """With evictions, a subscriber that joins late, and a reset without a later step."""
    source = random.Random(seed)
    shared = [source.randrange(50_000) for _ in range(48)]
    prompts = [shared * (number % 2) + [source.randrange(50_000) for _ in range(70)] for number in range(20)]
    engine = Engine("tokens", 60, asynchronous, max_model_len=512, options={"events": ANY_PORT})
    run_some(engine, prompts, 15, source)
    follow(subscriber, engine)
    require_equal(subscriber, engine, prompts)
    run_some(engine, prompts, 30, source)
    require_equal(subscriber, engine, prompts)
    assert 0 < sum(cached_tokens(engine, prompt) > 0 for prompt in prompts) < len(prompts)
    assert engine.scheduler.reset_prefix_cache()
    require_equal(subscriber, engine, prompts)
    assert not any(cached_tokens(engine, prompt) for prompt in prompts)
    engine.scheduler.shutdown()
    engine.scheduler.shutdown()


def test_scheduler_is_unchanged_by_events() -> None:
    """Random programs: the same tokens, hits and free blocks as without it; vLLM's own events are still there."""
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 128}
    engines = [Engine("stock", 60, **settings), Engine("tokens", 60, options={"events": ANY_PORT}, **settings)]
    Program(3, engines).run(200)
    assert engines[1].scheduler.pool_events.publisher.stats().num_messages > 0
    engines[1].scheduler.shutdown()


def test_failed_publisher_does_not_stop_the_engine(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is logged once, and requests are still served."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = Engine("tokens", 60, options={"events": ANY_PORT})
    publisher = engine.scheduler.pool_events.publisher
    publisher.error = OSError("the network is gone")
    for number in range(3):
        engine.add(request_of(f"r{number}", list(range(40)), 2))
        engine.drain()
    assert engine.hits == 64
    said = {id(record) for record in caplog.records if "has stopped" in record.getMessage()}
    assert len(said) == 1  # a record can be caught twice: by the handlers of two loggers
    engine.scheduler.shutdown()
    engine.require_empty()


def test_address_in_use_is_an_error() -> None:
    engine = Engine("tokens", 60, options={"events": ANY_PORT})
    taken = engine.scheduler.pool_events.publisher.endpoint
    with pytest.raises(Exception, match="cannot be bound"):
        Engine("tokens", 60, options={"events": taken})
    engine.scheduler.shutdown()


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5563"),
        ("tcp://127.0.0.1:*", 3, "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:0", 3, "tcp://127.0.0.1:0"),
        ("ipc:///run/events", 2, "ipc:///run/events_dp2"),
    ],
)
def test_every_rank_has_its_own_addresses(endpoint: str, rank: int, expected: str) -> None:
    assert address_of(endpoint, rank) == expected


def test_events_name_their_rank() -> None:
    """The third of four data-parallel engines puts its rank into every message; here a heartbeat."""
    engine = Engine("tokens", 60, options={"events": ANY_PORT}, rank=2)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(engine.scheduler.pool_events.publisher.endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        assert socket.poll(1000 * SECONDS)
        assert msgspec.msgpack.decode(socket.recv_multipart()[2])[2] == 2
    engine.scheduler.shutdown()
