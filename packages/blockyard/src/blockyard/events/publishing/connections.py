"""The TCP connections of ZeroMQ sockets, identified by file descriptor because ZeroMQ does not report their end.

`Subscriptions` limits the topics per connection, which ZeroMQ does not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from ..sockets import zmq

#: Position in Linux's TCP_INFO of the bytes that the peer has acknowledged.
_ACKNOWLEDGED = slice(120, 128)


class Connection:
    """A consumer's connection.

    The descriptor is ZeroMQ's, and may belong to another connection once this one has ended, so the peer's address is
    compared before it is used.
    """

    def __init__(self, descriptor: int, endpoint: str) -> None:
        self._endpoint = endpoint
        self.descriptor = descriptor
        with self._opened() as opened:
            self.peer: object = opened.getpeername()

    @classmethod
    def of(cls, frame: Any, endpoint: str) -> Connection | None:
        """Return the connection that a frame of the socket bound to `endpoint` arrived on; None if it has ended."""
        try:
            return cls(int(frame.get("__fd")), endpoint)
        except (OSError, ValueError, zmq.ZMQError):
            return None

    def num_taken(self) -> int | None:
        """Return the bytes that the peer has acknowledged; None if unknown (not TCP, not Linux, or ended)."""
        with contextlib.suppress(OSError), self._opened() as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and sys.platform == "linux":
                info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.stop)
                return int.from_bytes(info[_ACKNOWLEDGED], sys.byteorder)
        return None

    def cut(self) -> None:
        """Close the connection, discarding data in transit."""
        with contextlib.suppress(OSError), self._opened() as opened:
            if opened.getpeername() == self.peer and self._is_ours(opened):
                opened.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[socket.socket]:
        with socket.socket(fileno=os.dup(self.descriptor)) as opened:
            yield opened

    def _is_ours(self, opened: socket.socket) -> bool:
        name = opened.getsockname()
        if isinstance(name, tuple):
            return self._endpoint.endswith(f":{name[1]}")
        path = f"@{name[1:].decode()}" if isinstance(name, bytes) else name
        return self._endpoint == f"ipc://{path}"


#: Most topics per connection, and their bytes besides the publisher's topic. Unpublished topics also take memory.
MOST_TOPICS = 64
MOST_TOPIC_BYTES = 4096
#: Subscriptions queued in ZeroMQ. It processes all of them in one call, so with a longer queue a fast sender could
#: block the thread for tenths of a second.
MOST_UNSEEN = 1
#: Changes processed before messages are sent again.
CHANGES_A_TURN = 256
_SUBSCRIBE, _UNSUBSCRIBE = b"\1", b"\0"


class Subscriptions:
    """Tracks the subscriptions of an XPUB socket, and closes connections that have too many topics.

    ZeroMQ subscribers reconnect automatically but must send their topics again, so an attacker only wastes time.

    Args:
        pub: the socket.
        topic: the published topic, which any consumer may name.
    """

    def __init__(self, pub: Any, topic: bytes) -> None:
        self._pub = pub
        self._most_bytes = MOST_TOPIC_BYTES + len(topic)
        self._endpoint: str = pub.get_string(zmq.LAST_ENDPOINT)
        #: By file descriptor: the peer's address and the topics.
        self._topics: dict[int, tuple[object, set[bytes]]] = {}
        #: Connections closed.
        self.num_cut = 0

    def process(self) -> None:
        """Process changes of subscriptions. O(changes), at most 256."""
        for _ in range(CHANGES_A_TURN):
            try:
                frame = self._pub.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            connection = Connection.of(frame, self._endpoint)
            if connection is not None:
                self._note(connection, frame.bytes)

    def _note(self, connection: Connection, change: bytes) -> None:
        peer, topics = self._topics.get(connection.descriptor, (None, set()))
        if peer != connection.peer:  # the descriptor belongs to another connection now
            topics = set()
        self._topics[connection.descriptor] = connection.peer, topics
        if change[:1] == _SUBSCRIBE:
            topics.add(change[1:])
        elif change[:1] == _UNSUBSCRIBE:
            topics.discard(change[1:])
        if len(topics) > MOST_TOPICS or sum(map(len, topics)) > self._most_bytes:
            del self._topics[connection.descriptor]
            self.num_cut += 1
            connection.cut()
