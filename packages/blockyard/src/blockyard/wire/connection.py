"""Whole messages, in order, between two processes; a message that has begun goes on within a time limit."""

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
#: Of a message: nothing longer is read.
MAX_BYTES = 2**32
#: Messages up to these bytes are copied, and sent in one call of the system.
_ONE_CALL_BYTES = 2**14
#: Memory that is taken for a message before any of it has come; after that, as much again as has come.
_FIRST_BYTES = 2**20


class Connection(Protocol):
    """What carries messages: `SocketConnection`, `multiprocessing.Pipe()`, or one of your own."""

    def send_bytes(self, message: bytes, /) -> None:
        """Send one message. Raises `OSError` when the other side has gone."""

    def recv_bytes(self) -> bytes:
        """Return the next message. Raises `EOFError` or `OSError` when the other side has gone."""

    def poll(self, timeout: float = 0.0, /) -> bool:
        """Return whether a message comes within `timeout` seconds; True also when the other side has gone."""


class ConnectionLost(OSError):
    """The other side has ended, or was silent in the middle of a message."""


class SocketConnection:
    """`Connection` over a stream socket. `send_bytes` may be called by several threads, `recv_bytes` by one.

    limit: seconds that the other side may take nothing of a message that is sent, or send nothing of one that has
    begun. Between messages it may be silent forever. Where a message was cut short, by this limit, an error or Ctrl-C,
    no other one is sent or received: what comes next would be taken for its rest.
    """

    def __init__(self, connection: socket.socket, limit: float = 300.0) -> None:
        self._socket = connection
        self._limit = limit
        self._lock = threading.Lock()
        self._is_send_cut = self._is_receive_cut = False
        connection.settimeout(None)
        # Limits of the two directions that one thread may send in while another one receives.
        seconds = struct.pack("ll", int(limit), int(limit % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)

    def send_bytes(self, message: bytes, /) -> None:
        """Send one message. Raises `ConnectionLost` if the other side has ended, or takes nothing for the limit."""
        self.send_pieces((message,))

    def send_pieces(self, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send one message that lies in pieces, of bytes each, without a copy. Raises as `send_bytes`."""
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
                raise ConnectionLost(f"nothing was taken for {self._limit:g} s") from error
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            self._is_send_cut = False

    def recv_bytes(self, most: int = MAX_BYTES, seconds: float = math.inf) -> bytearray:
        """The next message, however late it begins, unless `seconds` are given: then all of it comes within them.

        Raises `ConnectionLost`, also for a message of more than `most` bytes.
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
        """Receive the next message into the buffers that `place` returns, which is told the first `num_first` bytes,
        and how many are left, as many as the buffers have to have. Raises as `recv_bytes`, and what `place` raises."""
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
        """Return whether a message begins within `timeout` seconds; True also when the other side has ended."""
        return self._is_ready(select.POLLIN, timeout)

    def takes(self) -> bool:
        """Return whether the other side has room for a short message now."""
        return self._is_ready(select.POLLOUT, 0.0)

    def close(self) -> None:
        """End the connection; the other side notices."""
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
            self._is_receive_cut = True  # until the whole message is here
            if done < len(room) and time.monotonic() > end:
                raise ConnectionLost("a message came too slowly")

    def _receive_into(self, room: memoryview) -> int:
        """Wait for some of a message; returns how many bytes came."""
        while True:
            try:
                count = self._socket.recv_into(room, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                if not self._is_receive_cut:
                    continue
                raise ConnectionLost(f"a message broke off for {self._limit:g} s") from error
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("the other side has ended")
            return count


def _refuse_cut(is_cut: bool, what: str) -> None:
    if is_cut:
        raise ConnectionLost(f"the message before was cut short while it was {what}")
