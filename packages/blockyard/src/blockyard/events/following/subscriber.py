"""Keeps a mirror up to date over ZeroMQ: reads what publishers send, and asks for what is missing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ...arguments import require_str, require_unicode, shown
from ...errors import InvalidArgument, PublisherError
from ..sockets import connected, zmq
from ..wire import END_SEQUENCE
from .mirror import Mirror
from .stream import Trust

_log = logging.getLogger(__name__)

#: Seconds without a message of a replay after which it is asked for again: at first, and after twice as long each time,
#: because a publisher may need long for a large snapshot.
REPLAY_PATIENCE = 2.0
MOST_PATIENCE = 64.0
#: Seconds from the end of a replay to the next request: at first, and twice as long after each that left nothing to
#: trust: a publisher that sends what cannot be read gets few requests.
LEAST_PAUSE = 0.05
MOST_PAUSE = 5.0
#: The longest that one call waits.
MOST_SECONDS = 86400
#: Largest message that is read, in bytes: a snapshot of two million blocks; a sender of more is cut off.
MAX_MESSAGE_BYTES = 2**28
#: Messages read from one socket before it is another's turn.
MESSAGES_A_TURN = 256


class _Source:
    """The two sockets of one publisher."""

    def __init__(self, context: Any, name: str, endpoint: str, replay_endpoint: str, topic: bytes) -> None:
        self.name = name
        self.asked_at = 0.0
        self.patience = REPLAY_PATIENCE
        self.pause = LEAST_PAUSE
        self.is_asking = False
        self.heard_at = time.monotonic()
        self._context = context
        self._replay_endpoint = replay_endpoint
        self.live = connected(context, zmq.SUB, "endpoint", endpoint, MAX_MESSAGE_BYTES)
        try:
            self.live.setsockopt(zmq.SUBSCRIBE, topic)
            self.replay = connected(context, zmq.DEALER, "replay_endpoint", replay_endpoint, MAX_MESSAGE_BYTES)
        except BaseException:
            self.live.close()
            raise

    def renew(self) -> None:
        """Make a connection for the next replay: nothing that is left of another one arrives there.

        Raises `PublisherError` where the process may open no more, and keeps the old one.
        """
        fresh = connected(self._context, zmq.DEALER, "replay_endpoint", self._replay_endpoint, MAX_MESSAGE_BYTES)
        self.replay.close()
        self.replay = fresh

    def ask(self, start: int) -> None:
        """Ask for a replay, on a renewed connection."""
        with contextlib.suppress(zmq.Again):
            self.replay.send_multipart((b"", start.to_bytes(8, "big")), zmq.DONTWAIT)
        self.is_asking = True
        self.asked_at = time.monotonic()

    def close(self) -> None:
        """Close both connections."""
        self.live.close()
        self.replay.close()


class Subscriber:
    """Feeds `mirror` from publishers: vLLM's, SGLang's or ours.

        mirror = Mirror()
        with Subscriber(mirror) as subscriber:
            subscriber.follow("worker-0", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
            while True:
                subscriber.poll(1.0)
                mirror.match(token_ids)

    Everything happens in `poll`, on the caller's thread.
    """

    def __init__(self, mirror: Mirror) -> None:
        if not isinstance(mirror, Mirror):
            raise InvalidArgument(f"mirror is {type(mirror).__name__}; it must be a Mirror")
        self.mirror = mirror
        self._context = zmq.Context(io_threads=1)
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)  # 1,023 would end at 511 workers
        self._sources: dict[str, _Source] = {}
        #: Of all sockets, kept from one `poll` to the next, and whose each is; None when a socket has changed.
        self._poller: Any = None
        self._owners: dict[Any, _Source] = {}
        #: Sources of which something is missing, as far as the last look at each says.
        self._behind: dict[str, _Source] = {}

    def follow(self, worker: str, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        """Listen to a publisher from now on; what it holds already is asked for. topic: the beginning of its topic.

        Raises `InvalidArgument` for a worker that is followed already, `PublisherError` for an endpoint of bad
        form, on a closed subscriber, and where the process may open no more files: a worker takes four.
        """
        name = require_str("worker", worker)
        if self._context.closed:
            raise PublisherError("this subscriber is closed; make another one")
        if name in self._sources:
            raise InvalidArgument(f"worker is {name!r}; it is followed already")
        chosen = require_unicode("topic", require_str("topic", topic)).encode()
        self._sources[name] = self._behind[name] = _Source(self._context, name, endpoint, replay_endpoint, chosen)
        self._poller = None

    def unfollow(self, worker: str) -> None:
        """Listen no more, and forget what the worker had."""
        source = self._sources.pop(require_str("worker", worker), None)
        if source is None:
            raise InvalidArgument(f"worker is {worker!r}; it is not followed")
        self._behind.pop(worker, None)
        self._poller = None
        source.close()
        self.mirror.forget(worker)

    def seconds_since_message(self, worker: str) -> float:
        """Seconds since `poll` read a message of a worker, or since it is followed: a heartbeat is one too. O(1)."""
        source = self._sources.get(require_str("worker", worker))
        if source is None:
            raise InvalidArgument(f"worker is {worker!r}; it is not followed")
        return time.monotonic() - source.heard_at

    def poll(self, timeout: float = 0.0) -> int:
        """Read what has arrived, waiting at most `timeout` seconds for the first; returns how many messages.

        O(workers), of which those without news take a fraction of a microsecond each. Raises `InvalidArgument` for a
        timeout below 0 or above a day.
        """
        _require_seconds(timeout)
        if self._poller is None:
            self._make_poller()
        ready = self._poller.poll(int(1000 * timeout))
        sources = {source.name: source for source in (self._owners[socket] for socket, _ in ready)}
        return sum(self._serve(source) for source in (sources | self._behind).values())

    def _make_poller(self) -> None:
        self._poller, self._owners = zmq.Poller(), {}
        for source in self._sources.values():
            for socket in (source.live, source.replay):
                self._poller.register(socket, zmq.POLLIN)
                self._owners[socket] = source

    def wait_until_live(self, timeout: float) -> bool:
        """Poll until nothing is missing of any worker; False if that takes longer than `timeout` seconds.

        Raises `InvalidArgument` for a timeout below 0 or above a day.
        """
        _require_seconds(timeout)
        deadline = time.monotonic() + timeout
        while any(self.mirror.trust(name) is not Trust.LIVE for name in self._sources):
            if time.monotonic() > deadline:
                return False
            self.poll(0.05)
        return True

    def _serve(self, source: _Source) -> int:
        read = self._read_live(source) + self._read_replay(source)
        if read:
            source.heard_at = time.monotonic()
        if self.mirror.is_replay_void(source.name):
            source.is_asking = False  # the next request has a connection of its own: nothing of this answer is read
        start = self.mirror.replay_from(source.name)
        if start is None:
            source.pause = LEAST_PAUSE
            self._behind.pop(source.name, None)
        else:
            self._behind[source.name] = source
            self._ask_if_due(source, start)
        return read

    def _ask_if_due(self, source: _Source, start: int) -> None:
        waited = time.monotonic() - source.asked_at
        if source.is_asking:
            if waited <= source.patience:
                return
            source.patience = min(2 * source.patience, MOST_PATIENCE)
        elif waited <= source.pause:
            return
        else:
            is_worse = self.mirror.trust(source.name) is Trust.UNTRUSTED
            source.pause = min(2 * source.pause, MOST_PAUSE) if is_worse else LEAST_PAUSE
        self._poller = None  # its replay socket becomes another
        try:
            source.renew()
        except PublisherError:
            source.asked_at = time.monotonic()
            _log.exception("worker %s cannot be asked for a replay yet", shown(source.name))
            return
        self.mirror.begin_replay(source.name)
        source.ask(start)

    def _read_live(self, source: _Source) -> int:
        count = 0
        for frames in _arrived(source.live):
            count += 1
            if len(frames) == 3 and len(frames[1]) == 8:
                self.mirror.live(source.name, int.from_bytes(frames[1], "big"), frames[2])
        return count

    def _read_replay(self, source: _Source) -> int:
        count = 0
        for frames in _arrived(source.replay):
            count += 1
            source.asked_at = time.monotonic()
            if len(frames) < 3 or len(frames[-2]) != 8:
                continue
            if frames[-2] == END_SEQUENCE:
                source.is_asking = False
                source.patience = REPLAY_PATIENCE
                self.mirror.end_of_replay(source.name)
            else:
                self.mirror.replayed(source.name, int.from_bytes(frames[-2], "big"), frames[-1])
        return count

    def close(self) -> None:
        """End the sockets. A second call does nothing."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        self._behind.clear()
        self._poller = None
        self._context.term()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _require_seconds(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 <= timeout <= MOST_SECONDS:
        raise InvalidArgument(f"timeout is {shown(timeout)}; it must be from 0 to {MOST_SECONDS} seconds")


def _arrived(socket: Any) -> Iterator[list[bytes]]:
    """Yield the messages that are there, at most those of a turn."""
    for _ in range(MESSAGES_A_TURN):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
