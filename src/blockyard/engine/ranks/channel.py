"""Messages between rank 0 and another rank, over a stream socket: a kind, a length, a body."""

from __future__ import annotations

import json
import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum
from typing import Any

_HEAD = struct.Struct("<BQ")
#: Of a body: no step comes near it, and nothing longer is read.
MAX_BYTES = 2**32
#: How long a message may wait for the other side to read.
SEND_SECONDS = 300


class Kind(IntEnum):
    """What a message is, in the order in which they come: from rank 0 (>) or to it (<)."""

    START = 1  # > which model, as which rank (processes of our own alone)
    HELLO = 2  # < what the rank has
    WELCOME = 3  # > join
    SETTINGS = 4  # > the cache
    READY = 5  # < everything is made
    STEP = 6  # >
    FAILED = 7  # < why the rank ends
    CLOSE = 8  # > end; the body says why, if something is wrong


class ChannelClosed(Exception):
    """The other side has ended."""


class Channel:
    """One side of it. Whole messages, in order. `send` may be called by several threads, `receive` by one."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        # A stopped process reads nothing: without a limit, a step that its buffer cannot hold would never be sent.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self._lock = threading.Lock()

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a message. Raises `ChannelClosed` if the other side has ended."""
        try:
            with self._lock:
                self.socket.sendall(_HEAD.pack(kind, len(body)))
                self.socket.sendall(body)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> tuple[Kind, bytearray]:
        """The next message, however long it takes. Raises `ChannelClosed` if the other side has ended."""
        number, length = _HEAD.unpack(self._read(_HEAD.size))
        if number not in Kind._value2member_map_ or length > MAX_BYTES:
            raise ChannelClosed(f"no message begins with {number}, {length}")
        return Kind(number), self._read(length)

    def send_json(self, kind: Kind, fields: dict[str, Any]) -> None:
        """Send a message of plain values."""
        self.send(kind, json.dumps(fields).encode())

    def close(self) -> None:
        """End it; the other side notices."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def _read(self, length: int) -> bytearray:
        body = bytearray(length)
        view, done = memoryview(body), 0
        while done < length:
            try:
                count = self.socket.recv_into(view[done:])
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not count:
                raise ChannelClosed("the other side has ended")
            done += count
        return body
