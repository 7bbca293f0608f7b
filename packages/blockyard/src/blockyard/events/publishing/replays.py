"""Answers to consumers that ask for a replay: a few at a time, each as fast as it reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..sockets import SENT_FROM_PLACE, zmq
from ..wire import END_SEQUENCE, Payload
from .connections import Connection
from .feed import Numbered

#: Consumers that are answered at a time. Others wait in the socket, which holds a bounded number of requests.
MOST_AT_A_TIME = 16
#: Consumers to whom a long message may be on its way, mostly a snapshot: each is memory of its own until it is read.
MOST_LONG = 8
#: Requests read, bad ones too, before live messages go out.
REQUESTS_A_TURN = 64
#: Messages sent to one consumer before it is another's turn, and before live messages go out.
MESSAGES_A_TURN = 256
#: Seconds after which a consumer that does not read is given up, and where all places are taken. It asks again.
PATIENCE = 10.0
HASTE = 1.0
#: Bytes that a consumer must take in `HASTE` seconds to keep its long message where all places for those are taken.
LEAST_BYTES = 2**16
#: `HASTE` where consumers that do not read have been cut one after another; bytes are fewer by as much.
LEAST_HASTE = 0.05
#: Seconds to wait when no consumer reads.
PAUSE = 0.005


class Haste:
    """Says how long who reads nothing keeps a place that others wait for.

    A cut halves it and a consumer that has read doubles it again, from `HASTE` down to `LEAST_HASTE`, at the same rate
    of bytes. So a hundred that never read delay the others by two seconds and not by one for each eight of them.
    """

    def __init__(self) -> None:
        self.seconds = HASTE

    @property
    def least_bytes(self) -> int:
        """Return what must be taken in these seconds."""
        return int(LEAST_BYTES * self.seconds / HASTE)

    def note_cut(self) -> None:
        """Consumers were cut."""
        self.seconds = max(self.seconds / 2, LEAST_HASTE)

    def note_read(self) -> None:
        """A consumer has read its message."""
        self.seconds = min(self.seconds * 2, HASTE)


class LongMessage:
    """One that is on its way to a consumer, and how fast it is read."""

    def __init__(self, tracker: Any, connection: Connection | None) -> None:
        self._tracker = tracker
        self._connection = connection
        self._taken: int | None = None
        #: From when on a consumer that takes too little is stuck.
        self._until = 0.0
        self._is_cut = False

    @property
    def was_read(self) -> bool:
        """Return whether its consumer has taken all of it."""
        return self.is_gone and not self._is_cut

    @property
    def is_gone(self) -> bool:
        """Return whether all of it was sent, or its connection has ended."""
        return bool(self._tracker.done)

    def is_stuck(self, haste: Haste) -> bool:
        """Return whether its consumer has read too little in the seconds of `haste` since this was first asked. O(1).

        Where it cannot be seen how much is read: whether it is still on its way after `PATIENCE` seconds.
        """
        taken = self._connection.num_taken() if self._connection else None
        if self._until == 0.0 or (taken is not None and taken >= (self._taken or 0) + haste.least_bytes):
            self._taken = taken
            self._until = time.monotonic() + (PATIENCE if taken is None else haste.seconds)
        return time.monotonic() > self._until

    def cut(self) -> bool:
        """End its connection, and give its memory back; whether this is the first time."""
        if self._connection is not None:
            self._connection.cut()
        was_cut, self._is_cut = self._is_cut, True
        return not was_cut


class Replays:
    """The replays that are under way on a ROUTER socket.

    A request is [identity, "", start] with the start as 8 bytes, big-endian; some consumers leave the empty frame out.
    Anything else is counted and not answered. The answer is [identity, "", topic, number, payload] for each message,
    and last [identity, "", "", -1, ""].
    """

    def __init__(self, router: Any, topic: bytes, replay: Callable[[int], Iterator[Numbered]]) -> None:
        self._router = router
        self._topic = topic
        self._replay = replay
        self._endpoint: str = router.get_string(zmq.LAST_ENDPOINT)
        #: By consumer, what it is still to get, and when it is given up.
        self._running: dict[bytes, Iterator[tuple[Payload, ...]]] = {}
        self._deadlines: dict[bytes, float] = {}
        self._connections: dict[bytes, Connection | None] = {}
        #: By consumer, the last long message, until it has been read or the consumer is gone.
        self._long: dict[bytes, LongMessage] = {}
        self._haste = Haste()
        #: Consumers of whose replay nothing is made yet.
        self._unbegun: set[bytes] = set()
        #: A message that a consumer had no room for.
        self._unsent: dict[bytes, tuple[Payload, ...]] = {}
        #: Requests that could not be read; replays answered to the end, and those given up.
        self.num_refused = self.num_answered = self.num_given_up = 0
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def are_waiting(self) -> bool:
        """Return whether some consumer has not got all that it asked for."""
        return bool(self._running)

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= MOST_AT_A_TIME

    def go_on(self, has_requests: bool) -> None:
        """Take new requests, and send to each consumer what it has room for."""
        for _ in range(REQUESTS_A_TURN if has_requests else 0):
            if self._is_full or not self._take_request():
                break
        sent = [self._send_some(identity) for identity in list(self._running)]
        if sent and not any(sent):
            time.sleep(PAUSE)

    def _take_request(self) -> bool:
        try:
            given = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        frames = [frame.bytes for frame in given]
        if len(frames) not in (2, 3) or len(frames[-1]) != 8 or (len(frames) == 3 and frames[1]):
            self.num_refused += 1
            return True
        identity, start = frames[0], int.from_bytes(frames[-1], "big")
        self._unsent.pop(identity, None)
        self._running[identity] = self._messages(start)
        self._connections[identity] = Connection.of(given[-1], self._endpoint)
        self._unbegun.add(identity)
        self._deadlines[identity] = time.monotonic() + PATIENCE
        return True

    def _messages(self, start: int) -> Iterator[tuple[Payload, ...]]:
        for sequence, payload in self._replay(start):
            yield self._topic, sequence.to_bytes(8, "big"), payload
        yield b"", END_SEQUENCE, b""

    def _send_some(self, identity: bytes) -> bool:
        """Return whether the consumer took anything, or is done with."""
        if identity in self._unbegun and not self._may_begin(identity):
            return self._wait_for(identity, False)
        self._unbegun.discard(identity)
        for number in range(MESSAGES_A_TURN):
            try:
                message = self._unsent.pop(identity, None) or next(self._running[identity], None)
            except Exception:  # its answer cannot be made; others may be
                self._give_up(identity)
                return True
            if message is None:
                self.num_answered += 1
                self._end(identity)
                return True
            try:
                tracker = self._router.send_multipart((identity, b"", *message), zmq.DONTWAIT, copy=False, track=True)
            except zmq.Again:
                self._unsent[identity] = message
                return self._wait_for(identity, number > 0)
            except zmq.ZMQError:  # it is gone
                self._give_up(identity)
                return True
            if len(message[-1]) >= SENT_FROM_PLACE:
                self._long[identity] = LongMessage(tracker, self._connections[identity])
        return self._wait_for(identity, True)

    def _may_begin(self, identity: bytes) -> bool:
        """Whether a replay may begin, which may need a snapshot: who asks and never reads gets one, not hundreds."""
        for message in self._long.values():
            if message.was_read:
                self._haste.note_read()
        self._long = {each: message for each, message in self._long.items() if not message.is_gone}
        if len(self._long) >= MOST_LONG:
            num_cut = sum(message.is_stuck(self._haste) and message.cut() for message in self._long.values())
            self.num_given_up += num_cut
            if num_cut:
                self._haste.note_cut()
        return identity not in self._long and len(self._long) < MOST_LONG

    def _wait_for(self, identity: bytes, took_some: bool) -> bool:
        """A consumer that reads has time again; one that has read nothing for too long is given up."""
        now = time.monotonic()
        if took_some:
            self._deadlines[identity] = now + PATIENCE
        elif now > self._deadlines[identity] - (PATIENCE - HASTE if self._is_full else 0.0):
            self._give_up(identity)
        return took_some

    def _give_up(self, identity: bytes) -> None:
        self.num_given_up += 1
        if identity in self._unbegun:  # it has room: some consumers would wait for their answer forever
            with contextlib.suppress(zmq.ZMQError):
                self._router.send_multipart((identity, b"", b"", END_SEQUENCE, b""), zmq.DONTWAIT)
        self._end(identity)

    def _end(self, identity: bytes) -> None:
        del self._running[identity], self._deadlines[identity], self._connections[identity]
        self._unbegun.discard(identity)
        self._unsent.pop(identity, None)
