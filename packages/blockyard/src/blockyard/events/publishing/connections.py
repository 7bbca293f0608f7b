"""A connection behind a message is known by its file descriptor, because ZeroMQ has no word for its end.

`Subscriptions` bounds the topics of each: ZeroMQ keeps any number for them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from ..sockets import zmq

#: Where Linux has the bytes that the other side has acknowledged in what it tells of a TCP connection.
_ACKNOWLEDGED = slice(120, 128)


class Connection:
    """This is a consumer's connection, as long as it lasts.

    descriptor: ZeroMQ's own. peer: who is at the other end; once the connection has ended the descriptor may be
    anything's, so both are compared before anything is done.
    """

    def __init__(self, descriptor: int, endpoint: str) -> None:
        self._endpoint = endpoint
        self.descriptor = descriptor
        with self._opened() as opened:
            self.peer: object = opened.getpeername()

    @classmethod
    def of(cls, frame: Any, endpoint: str) -> Connection | None:
        """Return the one on which a frame came to the socket bound to `endpoint`, None once it has ended."""
        try:
            return cls(int(frame.get("__fd")), endpoint)
        except (OSError, ValueError, zmq.ZMQError):
            return None

    def num_taken(self) -> int | None:
        """Bytes that the other side has taken; None where that is not known: not TCP, or not Linux, or ended."""
        with contextlib.suppress(OSError), self._opened() as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6) and sys.platform == "linux":
                told = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.stop)
                return int.from_bytes(told[_ACKNOWLEDGED], sys.byteorder)
        return None

    def cut(self) -> None:
        """End it, and what is on its way; nothing if it has ended."""
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


#: Topics of one connection, and their bytes together besides our own topic: one that is not published costs memory too.
MOST_TOPICS = 64
MOST_TOPIC_BYTES = 4096
#: Subscriptions that wait for ZeroMQ. It takes in all that wait whenever the thread calls it: where more may wait, a
#: sender in a hurry keeps it at that for tenths of a second.
MOST_UNSEEN = 1
#: Changes looked at before it is the messages' turn again.
CHANGES_A_TURN = 256
_SUBSCRIBE, _UNSUBSCRIBE = b"\1", b"\0"


class Subscriptions:
    """Follows who subscribes to what on an XPUB socket, and cuts off connections that want too many topics.

    A subscriber of ZeroMQ connects again by itself, and has its topics to send again: one that means harm uses up its
    own time. topic: what is published, which any consumer may name.
    """

    def __init__(self, pub: Any, topic: bytes) -> None:
        self._pub = pub
        self._most_bytes = MOST_TOPIC_BYTES + len(topic)
        self._endpoint: str = pub.get_string(zmq.LAST_ENDPOINT)
        #: By the connection's file descriptor: who is at its other end, and the topics.
        self._topics: dict[int, tuple[object, set[bytes]]] = {}
        #: Connections that were cut off.
        self.num_cut = 0

    def go_on(self) -> None:
        """Take in what has changed. O(changes), 256 at most."""
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
        if peer != connection.peer:  # another connection has its descriptor now
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
