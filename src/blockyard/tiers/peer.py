"""A peer is a tier: it serves the objects of its memory or disk, over a socket and in messages of the wire.

`PeerServer` answers, and several engines may ask it at once:

    client                        server
    get(name, most)      ───────▶         the first bytes of an object, `most` of them
                         ◀─────── answer  the cause of a miss, or how many bytes come; then these
    put(name)            ───────▶         and then the object
    sizes, remove(names) ───────▶
    names()              ───────▶

What comes is what lies in the peer's place, page and payload. The one who asked verifies it, as of any other place; the
one who is given an object to keep verifies it too. Between machines there is no password and no encryption.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import InvalidArgument, PeerMismatch
from ..wire.connection import ConnectionLost, SocketConnection
from ..wire.message import Message, pack
from .addresses import host_and_port
from .header import PAGE_BYTES, BadObject
from .index import ObjectIndex
from .tier import MAX_OBJECT_BYTES, NAME_BYTES, Cause
from .worker import PlaceError, Task, WorkingTier

#: Bytes of a message that asks or answers, of a whole object, and of the names of a place.
MOST_ASKED_BYTES = 2**20
MOST_OBJECT_BYTES = PAGE_BYTES + MAX_OBJECT_BYTES
_MOST_NAMES_BYTES = 2**30
#: Bytes a second: a peer that sends more slowly for long is a miss.
_LEAST_SPEED = 2**20
#: Names in one message.
_A_GO = 1000
#: Connections of a process that forked this one: they are its own, and are not shut down here.
_inherited: list[SocketConnection] = []


class PeerTier(WorkingTier):
    """Keeps the objects at a peer that serves its place (`PeerServer`, `blockyard tier serve`); several may use it.

    url: peer:host:port. timeout: seconds that the peer may be silent, also in the middle of an object, or take nothing:
    then it is a miss (UNREACHABLE). The peer has the budget, and what it evicts is a miss too (GONE). max_known: how
    many objects are remembered to be there. more: see `WorkingTier`.
    Raises `InvalidArgument` for what is no such url. Asks the peer nothing yet.
    """

    def __init__(self, url: str, timeout: float = 5.0, max_known: int = 2**20, **more: Any) -> None:
        self._address = host_and_port("url", url, "peer:")
        self._timeout = timeout
        self._idle: list[SocketConnection] = []
        super().__init__(url, ObjectIndex(2**60, max_known), **more)
        self._start()

    def close(self, timeout: float = 10.0) -> bool:
        """End the threads and the connections. See `Tier.close`."""
        has_ended = super().close(timeout)
        while self._idle:
            self._idle.pop().close()
        return has_ended

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        _inherited.extend(self._idle)
        self._idle = []

    def _ask(self, kind: str, limit: int = 0, body: bytes | None = None, **fields: Any) -> tuple[dict[str, Any], Any]:
        """Ask the peer; returns the fields of its answer, and the bytes behind it, `limit` at most.

        A connection that has waited may have been closed meanwhile, which says nothing of the peer: then another one is
        made, once. Raises `BadObject` for a miss, `PlaceError`.
        """
        request = pack(kind, fields)
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connect(), True
            try:
                answer, data = self._exchange(connection, request, body, limit)
                cause = Cause(answer["cause"]) if answer["cause"] else None
            except (ConnectionLost, InvalidArgument, PeerMismatch, KeyError, TypeError, ValueError) as error:
                connection.close()
                if is_new or not isinstance(error, ConnectionLost):
                    raise PlaceError(Cause.UNREACHABLE, f"the peer: {error}") from None
                continue
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            if cause is None:
                return answer, data
            raise BadObject(cause) if answer.get("is_miss") else PlaceError(cause, answer.get("text"))

    def _connect(self) -> SocketConnection:
        try:
            made = socket.create_connection(self._address, min(self._timeout, 2.0))
        except OSError as error:
            raise PlaceError(Cause.UNREACHABLE, f"the peer does not answer: {error}") from None
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return SocketConnection(made, self._timeout)

    def _exchange(
        self, connection: SocketConnection, request: bytes, body: bytes | None, limit: int
    ) -> tuple[dict[str, Any], Any]:
        connection.send_bytes(request)
        if body is not None:
            connection.send_bytes(body)
        answer = Message.of(self._received(connection, MOST_ASKED_BYTES)).require("answer").fields
        return answer, self._received(connection, limit) if answer.get("has_bytes") else b""

    def _received(self, connection: SocketConnection, most: int) -> bytearray:
        if not connection.poll(self._timeout):
            raise PlaceError(Cause.UNREACHABLE, f"the peer was silent for {self._timeout:g} s")
        return connection.recv_bytes(most, self._timeout + most / _LEAST_SPEED)

    def _got(self, name: bytes, most: int) -> Any:
        return self._ask("get", most, name=name.hex(), most=most)[1]

    def _read(self, task: Task, position: int) -> None:
        # One byte more than is wanted: whatever an object's size, no more of it comes here.
        task.fill(position, memoryview(self._got(task.job.names[position], PAGE_BYTES + task.length(position) + 1)))

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        sizes: list[int] = []
        for size in self._ask("sizes", names=[name.hex() for name in names])[0].get("sizes", []):
            if type(size) is not int or size < 1:
                break
            sizes.append(size)
        return sizes[: len(names)]

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes all of these objects; those that are not there are no error. Raises `PlaceError`."""
        for first in range(0, len(names), _A_GO):
            self._ask("remove", names=[name.hex() for name in names[first : first + _A_GO]])

    def names(self) -> Iterator[bytes]:
        """Goes over the names of all objects at the peer. Raises `PlaceError`."""
        data = bytes(self._ask("names", _MOST_NAMES_BYTES)[1])
        yield from (data[first : first + NAME_BYTES] for first in range(0, len(data) - NAME_BYTES + 1, NAME_BYTES))

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole object or its first bytes, unverified. Raises `BadObject`, `PlaceError`."""
        return bytes(self._got(name, MOST_OBJECT_BYTES if num_bytes is None else num_bytes))

    def put(self, name: bytes, data: bytes) -> None:
        """Give the peer a whole object, which it verifies. Raises `PlaceError`."""
        self._ask("put", body=data, name=name.hex())
