"""Keeps a mirror up to date over ZeroMQ: receives the publishers' messages and requests replays."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ...arguments import require_str, require_unicode, shown
from ...errors import InvalidArgument, PublisherError
from ..sockets import connect_socket, zmq
from ..wire import END_SEQUENCE
from .mirror import Mirror
from .stream import Trust

_log = logging.getLogger(__name__)

#: Seconds without a message of a replay after which it is requested again. They double with each request, because a
#: publisher may need long for a large snapshot.
REPLAY_PATIENCE = 2.0
MOST_PATIENCE = 64.0
#: Seconds from the end of a replay to the next request. They double after each replay that leaves the worker untrusted,
#: so a publisher of unreadable messages gets few requests.
LEAST_PAUSE = 0.05
MOST_PAUSE = 5.0
#: Longest timeout of a call.
MOST_SECONDS = 86400
#: Largest message in bytes, a snapshot of two million blocks. The connection of a larger one is closed.
MAX_MESSAGE_BYTES = 2**28
#: Messages read from one socket before the next socket is served.
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
        self.live = connect_socket(context, zmq.SUB, "endpoint", endpoint, MAX_MESSAGE_BYTES)
        try:
            self.live.setsockopt(zmq.SUBSCRIBE, topic)
            self.replay = connect_socket(context, zmq.DEALER, "replay_endpoint", replay_endpoint, MAX_MESSAGE_BYTES)
        except BaseException:
            self.live.close()
            raise

    def renew(self) -> None:
        """Open a new connection for the next replay, so that no message of an earlier replay arrives on it.

        If the process may not open more sockets, raise `PublisherError` and keep the old connection.
        """
        fresh = connect_socket(self._context, zmq.DEALER, "replay_endpoint", self._replay_endpoint, MAX_MESSAGE_BYTES)
        self.replay.close()
        self.replay = fresh

    def ask(self, start: int) -> None:
        """Request a replay from `start`."""
        with contextlib.suppress(zmq.Again):
            self.replay.send_multipart((b"", start.to_bytes(8, "big")), zmq.DONTWAIT)
        self.is_asking = True
        self.asked_at = time.monotonic()

    def close(self) -> None:
        self.live.close()
        self.replay.close()


class Subscriber:
    """Receives the messages of publishers (vLLM's, SGLang's or Blockyard's) for a mirror.

        mirror = Mirror()
        with Subscriber(mirror) as subscriber:
            subscriber.follow("worker-0", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
            while True:
                subscriber.poll(1.0)
                mirror.match(token_ids)

    All work happens in `poll`, on the caller's thread.
    """

    def __init__(self, mirror: Mirror) -> None:
        if not isinstance(mirror, Mirror):
            raise InvalidArgument(f"mirror is {type(mirror).__name__}; it must be a Mirror")
        self.mirror = mirror
        self._context = zmq.Context(io_threads=1)
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)  # 1,023 would end at 511 workers
        self._sources: dict[str, _Source] = {}
        #: Poller of all sockets, and the source of each; None if a socket has changed since the last `poll`.
        self._poller: Any = None
        self._owners: dict[Any, _Source] = {}
        #: Sources with missing messages.
        self._behind: dict[str, _Source] = {}

    def follow(self, worker: str, endpoint: str, replay_endpoint: str, topic: str = "") -> None:
        """Subscribe to a publisher and request its present contents.

        Args:
            worker: name for the publisher.
            endpoint: its PUB endpoint.
            replay_endpoint: its replay endpoint.
            topic: prefix of its topic.

        Raises:
            InvalidArgument: the worker is already followed.
            PublisherError: an endpoint is malformed, the subscriber is closed, or the process may not open more files
                (a worker needs four).
        """
        name = require_str("worker", worker)
        if self._context.closed:
            raise PublisherError("this subscriber is closed; make another one")
        if name in self._sources:
            raise InvalidArgument(f"worker is {name!r}; it is already followed")
        chosen = require_unicode("topic", require_str("topic", topic)).encode()
        self._sources[name] = self._behind[name] = _Source(self._context, name, endpoint, replay_endpoint, chosen)
        self._poller = None

    def unfollow(self, worker: str) -> None:
        """Unsubscribe from a worker and forget its contents."""
        source = self._sources.pop(require_str("worker", worker), None)
        if source is None:
            raise InvalidArgument(f"worker is {worker!r}; it is not followed")
        self._behind.pop(worker, None)
        self._poller = None
        source.close()
        self.mirror.forget(worker)

    def seconds_since_message(self, worker: str) -> float:
        """Return the seconds since the last message of the worker, heartbeats included, or since it was followed.

        O(1).
        """
        source = self._sources.get(require_str("worker", worker))
        if source is None:
            raise InvalidArgument(f"worker is {worker!r}; it is not followed")
        return time.monotonic() - source.heard_at

    def poll(self, timeout: float = 0.0) -> int:
        """Read the messages that have arrived, waiting at most `timeout` seconds for the first; return their number.

        O(workers); a worker without messages takes a fraction of a microsecond. Raises `InvalidArgument` for a timeout
        below 0 or above a day.
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
        """Poll until no message is missing. Return False if that takes longer than `timeout` seconds.

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
            source.is_asking = False  # the next request uses a new connection: the rest of this replay is not read
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
        self._poller = None  # the replay socket is replaced
        try:
            source.renew()
        except PublisherError:
            source.asked_at = time.monotonic()
            _log.exception("no replay can be requested from worker %s yet", shown(source.name))
            return
        self.mirror.begin_replay(source.name)
        source.ask(start)

    def _read_live(self, source: _Source) -> int:
        count = 0
        for frames in _arrived(source.live):
            count += 1
            if len(frames) == 3 and len(frames[1]) == 8:
                self.mirror.receive_live(source.name, int.from_bytes(frames[1], "big"), frames[2])
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
                self.mirror.end_replay(source.name)
            else:
                self.mirror.receive_replayed(source.name, int.from_bytes(frames[-2], "big"), frames[-1])
        return count

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
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
    """Yield the messages that have arrived, at most `MESSAGES_A_TURN`."""
    for _ in range(MESSAGES_A_TURN):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
