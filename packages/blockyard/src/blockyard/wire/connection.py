"""Connections that carry whole messages in order between two processes, with time limits."""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

_LENGTH = struct.Struct("<Q")
#: Longest message that is read.
MAX_BYTES = 2**32
#: Messages up to this size are copied and sent in one system call.
_ONE_CALL_BYTES = 2**14
#: Memory allocated for a message before any of it has arrived. It doubles as bytes arrive.
_FIRST_BYTES = 2**20


class Connection(Protocol):
    """A message connection: `SocketConnection`, `multiprocessing.Pipe()`, or your own."""

    def send_bytes(self, message: bytes, /) -> None:
        """Send one message. Raises `OSError` if the other side has closed."""

    def recv_bytes(self) -> bytes:
        """Return the next message. Raises `EOFError` or `OSError` if the other side has closed."""

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Return whether a message arrives within `timeout` seconds; also True if the other side has closed."""


class ConnectionLost(OSError):
    """The other side has closed the connection, or timed out within a message."""


class SocketConnection:
    """A `Connection` over a stream socket. Several threads may call `send_bytes`, one may call `recv_bytes`.

    If a message was cut short by the time limit, an error or Ctrl-C, no further message is sent or received in that
    direction, because it would be taken for the rest.

    Args:
        connection: the socket.
        limit: seconds without progress within a message, sent or received, after which the connection is lost. There is
            no limit between messages.
    """

    def __init__(self, connection: socket.socket, limit: float = 300.0) -> None:
        self._socket = connection
        self._limit = limit
        self._lock = threading.Lock()
        self._is_send_cut = self._is_receive_cut = False
        connection.settimeout(None)
        # Separate limits, because one thread may send while another one receives.
        seconds = struct.pack("ll", int(limit), int(limit % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)

    def send_bytes(self, message: bytes, /) -> None:
        """Send one message. Raises `ConnectionLost` if the other side has closed, or reads nothing within the limit."""
        self.send_pieces((message,))

    def send_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send one message given in pieces, without copying them. Raises as `send_bytes` does."""
        parts = [_LENGTH.pack(sum(map(len, pieces))), *(piece for piece in pieces if len(piece))]
        with self._lock:
            _refuse_cut(self._is_send_cut, "sent")
            self._is_send_cut = True
            parts = [b"".join(parts)] if sum(map(len, parts)) <= _ONE_CALL_BYTES else parts
            try:
                for part in parts[:-1]:
                    self._socket.sendall(part, socket.MSG_MORE)
                self._socket.sendall(parts[-1])
            except BlockingIOError as error:
                raise ConnectionLost(f"the other side read nothing for {self._limit:g} s") from error
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            self._is_send_cut = False

    def recv_bytes(self, most: int = MAX_BYTES, seconds: float = math.inf) -> bytearray:
        """Return the next message.

        Args:
            most: longest message to accept, in bytes.
            seconds: time limit for the whole message; none by default.

        Raises:
            ConnectionLost: the message is too long or too slow, or the other side has closed.
        """
        end = time.monotonic() + seconds
        message = self._receive(self._length(most, end), end)
        self._is_receive_cut = False
        return message

    def recv_into(
        self,
        num_first: int,
        place: Callable[[bytearray, int], Sequence[memoryview]],
        most: int = MAX_BYTES,
        seconds: float = math.inf,
    ) -> None:
        """Receive the next message into buffers. Raises as `recv_bytes` does, and what `place` raises.

        Args:
            num_first: leading bytes to pass to `place`.
            place: returns the buffers, given these bytes and the number of bytes that follow. Their sizes must add up
                to it.
            most: longest message to accept, in bytes.
            seconds: time limit for the whole message; none by default.
        """
        end = time.monotonic() + seconds
        length = self._length(most, end)
        first = self._receive(min(num_first, length), end)
        for room in place(first, length - len(first)):
            self._fill(room, end)
        self._is_receive_cut = False

    def _length(self, most: int, end: float) -> int:
        _refuse_cut(self._is_receive_cut, "received")
        length = int(_LENGTH.unpack(self._receive(_LENGTH.size, end))[0])
        if length > most:
            raise ConnectionLost(f"a message of {length} bytes was announced; {most} are read at most")
        return length

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Return whether a message begins within `timeout` seconds; also True if the other side has closed."""
        return self._is_ready(select.POLLIN, timeout)

    def takes(self) -> bool:
        """Return whether a short message can be sent without waiting."""
        return self._is_ready(select.POLLOUT, 0.0)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _is_ready(self, what: int, timeout: float) -> bool:
        waiting = select.poll()
        try:
            waiting.register(self._socket, what)
        except ValueError:  # closed
            return what == select.POLLIN
        return bool(waiting.poll(timeout * 1000))

    def _receive(self, length: int, end: float) -> bytearray:
        data, done = bytearray(min(length, _FIRST_BYTES)), 0
        while done < length:
            if done == len(data):
                data += bytes(min(length - done, done))
            self._fill(memoryview(data)[done:], end)
            done = len(data)
        return data

    def _fill(self, room: memoryview, end: float) -> None:
        done = 0
        while done < len(room):
            done += self._receive_into(room[done:])
            self._is_receive_cut = True  # until the whole message has arrived
            if done < len(room) and time.monotonic() > end:
                raise ConnectionLost("a message exceeded its time limit")

    def _receive_into(self, room: memoryview) -> int:
        """Wait for bytes of a message; return how many arrived."""
        while True:
            try:
                count = self._socket.recv_into(room, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                if not self._is_receive_cut:
                    continue
                raise ConnectionLost(f"a message stopped for {self._limit:g} s") from error
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("the other side has closed the connection")
            return count


def _refuse_cut(is_cut: bool, what: str) -> None:
    if is_cut:
        raise ConnectionLost(f"an earlier message was cut short while it was {what}; use a new connection")
