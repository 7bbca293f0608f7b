"""The connection behind a message: ZeroMQ has no word for its end, so it is known by its file descriptor."""

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
    """A consumer's connection, as long as it lasts.

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
        """That on which a frame came to the socket bound to `endpoint`; None once it has ended."""
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
