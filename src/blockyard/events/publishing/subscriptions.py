"""What subscribers subscribe to: ZeroMQ keeps any number of topics for them, this does not."""

from __future__ import annotations

from typing import Any

from ..sockets import zmq
from .connection import Connection

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
