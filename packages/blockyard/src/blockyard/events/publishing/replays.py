"""Answers replay requests: a few at a time, each as fast as its consumer reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..sockets import SENT_FROM_PLACE, zmq
from ..wire import END_SEQUENCE, Payload
from .connections import Connection
from .feed import Numbered

#: Consumers answered at a time. Others wait in the socket, whose queue is bounded.
MOST_AT_A_TIME = 16
#: Consumers that may have a long message, mostly a snapshot, in transit. Each occupies memory until it is read.
MOST_LONG = 8
#: Requests read, including bad ones, before live messages are sent.
REQUESTS_A_TURN = 64
#: Messages sent to one consumer before others are served and live messages are sent.
MESSAGES_A_TURN = 256
#: Seconds after which a consumer that does not read is abandoned, and the same if all slots are taken.
PATIENCE = 10.0
HASTE = 1.0
#: Bytes that a consumer must read in `HASTE` seconds to keep its long message if all slots for those are taken.
LEAST_BYTES = 2**16
#: Lower bound of the seconds as consumers that do not read are disconnected one after another; bytes scale alike.
LEAST_HASTE = 0.05
#: Seconds to sleep if no consumer reads.
PAUSE = 0.005


class Haste:
    """Seconds that a consumer may keep a slot without reading while others wait for it.

    A disconnection halves them and a consumer that has read doubles them, between `LEAST_HASTE` and `HASTE`; the rate
    of bytes is constant. So a hundred consumers that never read delay the others by two seconds in total, instead of
    one second for each eight.
    """

    def __init__(self) -> None:
        self.seconds = HASTE

    @property
    def least_bytes(self) -> int:
        """Return the bytes to be read in these seconds."""
        return int(LEAST_BYTES * self.seconds / HASTE)

    def note_cut(self) -> None:
        """Record that consumers were disconnected."""
        self.seconds = max(self.seconds / 2, LEAST_HASTE)

    def note_read(self) -> None:
        """Record that a consumer has read its message."""
        self.seconds = min(self.seconds * 2, HASTE)


class LongMessage:
    """A long message in transit to a consumer, and how fast it is read."""

    def __init__(self, tracker: Any, connection: Connection | None) -> None:
        self._tracker = tracker
        self._connection = connection
        self._taken: int | None = None
        #: Time from which a consumer that reads too little counts as stuck.
        self._until = 0.0
        self._is_cut = False

    @property
    def was_read(self) -> bool:
        """Return whether the consumer has read all of it."""
        return self.is_gone and not self._is_cut

    @property
    def is_gone(self) -> bool:
        """Return whether all of it was sent, or the connection has ended."""
        return bool(self._tracker.done)

    def is_stuck(self, haste: Haste) -> bool:
        """Return whether the consumer has read too little in the seconds of `haste` since the first call. O(1).

        If its progress is unknown, return whether the message is still in transit after `PATIENCE` seconds.
        """
        taken = self._connection.num_taken() if self._connection else None
        if self._until == 0.0 or (taken is not None and taken >= (self._taken or 0) + haste.least_bytes):
            self._taken = taken
            self._until = time.monotonic() + (PATIENCE if taken is None else haste.seconds)
        return time.monotonic() > self._until

    def cut(self) -> bool:
        """Close the connection and free the memory. Return False if that was done before."""
        if self._connection is not None:
            self._connection.cut()
        was_cut, self._is_cut = self._is_cut, True
        return not was_cut


class Replays:
    """The replays in progress on a ROUTER socket.

    A request is [identity, "", start] with the start as 8 bytes, big-endian; some consumers omit the empty frame. Other
    messages are counted and not answered. The answer is [identity, "", topic, number, payload] for each message, and
    finally [identity, "", "", -1, ""].
    """

    def __init__(self, router: Any, topic: bytes, replay: Callable[[int], Iterator[Numbered]]) -> None:
        self._router = router
        self._topic = topic
        self._replay = replay
        self._endpoint: str = router.get_string(zmq.LAST_ENDPOINT)
        #: By consumer, the remaining messages, and when it is abandoned.
        self._running: dict[bytes, Iterator[tuple[Payload, ...]]] = {}
        self._deadlines: dict[bytes, float] = {}
        self._connections: dict[bytes, Connection | None] = {}
        #: By consumer, the last long message, until it was read or the connection has ended.
        self._long: dict[bytes, LongMessage] = {}
        self._haste = Haste()
        #: Consumers whose replay has not begun.
        self._unbegun: set[bytes] = set()
        #: By consumer, a message that did not fit into its queue.
        self._unsent: dict[bytes, tuple[Payload, ...]] = {}
        #: Unreadable requests, completed replays, abandoned replays.
        self.num_refused = self.num_answered = self.num_given_up = 0
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def are_waiting(self) -> bool:
        """Return whether any replay is incomplete."""
        return bool(self._running)

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= MOST_AT_A_TIME

    def advance(self, has_requests: bool) -> None:
        """Accept new requests, and send each consumer as much as its queue takes."""
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
        """Return whether the consumer read anything, or its replay has ended."""
        if identity in self._unbegun and not self._may_begin(identity):
            return self._wait_for(identity, False)
        self._unbegun.discard(identity)
        for number in range(MESSAGES_A_TURN):
            try:
                message = self._unsent.pop(identity, None) or next(self._running[identity], None)
            except Exception:  # this answer cannot be made; others may work
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
            except zmq.ZMQError:  # it has disconnected
                self._give_up(identity)
                return True
            if len(message[-1]) >= SENT_FROM_PLACE:
                self._long[identity] = LongMessage(tracker, self._connections[identity])
        return self._wait_for(identity, True)

    def _may_begin(self, identity: bytes) -> bool:
        """Return whether a replay, which may need a snapshot, may begin. A consumer that never reads gets only one."""
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
        """Extend the deadline of a consumer that reads; abandon one that has read nothing for too long."""
        now = time.monotonic()
        if took_some:
            self._deadlines[identity] = now + PATIENCE
        elif now > self._deadlines[identity] - (PATIENCE - HASTE if self._is_full else 0.0):
            self._give_up(identity)
        return took_some

    def _give_up(self, identity: bytes) -> None:
        self.num_given_up += 1
        if identity in self._unbegun:  # its queue is empty; some consumers would wait forever for an answer
            with contextlib.suppress(zmq.ZMQError):
                self._router.send_multipart((identity, b"", b"", END_SEQUENCE, b""), zmq.DONTWAIT)
        self._end(identity)

    def _end(self, identity: bytes) -> None:
        del self._running[identity], self._deadlines[identity], self._connections[identity]
        self._unbegun.discard(identity)
        self._unsent.pop(identity, None)
