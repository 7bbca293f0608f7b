"""A tier in another process, which serves its objects over a socket in messages of `blockyard.wire`.

`PeerServer` answers, and several engines may use it at once:

    client                        server
    get(name, most)      ───────▶         the first bytes of an object, at most `most`
                         ◀─────── answer  the cause of a miss, or that bytes follow; then these
    put(name)            ───────▶         followed by the object
    sizes, remove(names) ───────▶
    first(names)         ───────▶         the position of the first object that is present, and its size
    remove_bad(names)    ───────▶         deletes the objects that it finds bad itself
    names()              ───────▶

Objects are sent in their stored form, page and payload, and verified by the receiver, client or server. Requests are
numbered, and an answer repeats its request's number: a connection with another number is out of step and is closed.
There is no password and no encryption between machines.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from blockyard.errors import InvalidArgument, PeerMismatch
from blockyard.wire import ConnectionLost, Message, SocketConnection, pack

from .addresses import host_and_port
from .header import PAGE_BYTES, BadObject, Header
from .index import ObjectIndex
from .tier import MAX_OBJECT_BYTES, NAME_BYTES, Cause
from .worker import ActiveTransfer, BackendError, WorkingTier

#: Largest bytes of a request or an answer, of a whole object, and of all names.
MAX_MESSAGE_BYTES = 2**20
MAX_WHOLE_BYTES = PAGE_BYTES + MAX_OBJECT_BYTES
_MAX_NAMES_BYTES = 2**30
#: Bytes per second: an object of a peer that sends more slowly is a miss.
_MIN_SPEED = 2**20
#: Names per message.
_NAMES_PER_MESSAGE = 1000
#: Objects requested ahead: this many requests fit into a socket's buffer.
_MAX_AHEAD = 64
_Take = Callable[[SocketConnection], Any]
_Pieces = Sequence[bytes | memoryview]


class _OutOfStep(ConnectionLost):
    """The answer belongs to another request."""


@dataclass(slots=True, eq=False)
class _NumberedConnection:
    """A connection whose requests and answers are numbered."""

    connection: SocketConnection
    num_requests: int = 0
    num_answers: int = 0

    def send(self, kind: str, fields: dict[str, Any], body: _Pieces = ()) -> None:
        self.connection.send_bytes(pack(kind, {**fields, "number": self.num_requests}))
        self.num_requests += 1
        if body:
            self.connection.send_pieces(body)

    def fields(self, answer: bytearray) -> dict[str, Any]:
        """Return the fields of the next answer. Raises `PeerMismatch`, `_OutOfStep`."""
        fields = Message.of(answer).require("answer").fields
        if fields.get("number") != self.num_answers:
            raise _OutOfStep("the answer belongs to another request")
        self.num_answers += 1
        return fields


#: Connections of the parent process, kept alive: they are not shut down here.
_inherited: list[_NumberedConnection] = []


class PeerTier(WorkingTier):
    """Keeps objects in another process (`PeerServer`, `blockyard tier serve`). Several engines may share it.

    The peer has the budget; an object that it evicts is a miss (GONE). The constructor sends no request.

    Args:
        url: peer:host:port.
        timeout: seconds for which the peer may send or accept nothing; then the object is a miss (UNREACHABLE).
        max_known: number of objects remembered as present.
        **more: see `WorkingTier`.

    Raises:
        InvalidArgument: `url` is not such an address.
    """

    def __init__(self, url: str, timeout: float = 5.0, max_known: int = 2**20, **more: Any) -> None:
        self._address = host_and_port("url", url, "peer:")
        self._timeout = timeout
        self._idle: list[_NumberedConnection] = []
        super().__init__(url, ObjectIndex(2**60, max_known), **more)
        self._start()

    def close(self, timeout: float = 10.0) -> bool:
        has_ended = super().close(timeout)
        while self._idle:
            self._idle.pop().connection.close()
        return has_ended

    def _begin_in_child(self) -> None:
        _inherited.extend(
            [*self._idle, *(active.backend_state[0] for active in self._running.values() if active.backend_state)]
        )
        super()._begin_in_child()
        self._idle = []

    def _ask(
        self, kind: str, take: _Take | None = None, body: _Pieces = (), **fields: Any
    ) -> tuple[dict[str, Any], Any]:
        """Send a request; return the fields of its answer, and what `take` returns for the bytes after it."""

        return self._receive_answer(lambda numbered: numbered.send(kind, fields, body), take, self._idle.append)

    def _receive_answer(
        self,
        send: Callable[[_NumberedConnection], None],
        take: _Take | None,
        keep: Callable[[_NumberedConnection], None],
        pending: _NumberedConnection | None = None,
        may_move: bool = True,
    ) -> tuple[dict[str, Any], Any]:
        """Receive an answer on `pending`, or send the request on another connection and receive its answer there.

        `keep` gets the connection that was used. An idle connection may be closed or out of step although the peer is
        well: then, if `may_move`, another one is tried once. Raises `BadObject` for a miss, `BackendError`.
        """
        while True:
            numbered, is_new = pending, False
            if numbered is None:
                try:
                    numbered = self._idle.pop()
                except IndexError:
                    numbered, is_new = _NumberedConnection(self._connect()), True
            connection = numbered.connection
            try:
                if pending is None:
                    send(numbered)
                answer = numbered.fields(self._receive(connection, MAX_MESSAGE_BYTES))
                data = take(connection) if take is not None and answer.get("has_bytes") else b""
                cause = Cause(answer["cause"]) if answer["cause"] else None
                if take is not None and cause is None and not answer.get("has_bytes"):
                    raise InvalidArgument("the answer has neither bytes nor a cause")
            except (ConnectionLost, InvalidArgument, PeerMismatch, KeyError, TypeError, ValueError) as error:
                connection.close()
                if is_new or not may_move or not isinstance(error, ConnectionLost):
                    raise BackendError(Cause.UNREACHABLE, f"the peer: {error}") from None
                pending = None
                continue
            except BaseException:
                connection.close()
                raise
            keep(numbered)
            if cause is None:
                return answer, data
            raise BadObject(cause) if answer.get("is_miss") else BackendError(cause, answer.get("text"))

    def _connect(self) -> SocketConnection:
        try:
            made = socket.create_connection(self._address, min(self._timeout, 2.0))
        except OSError as error:
            raise BackendError(Cause.UNREACHABLE, f"the peer does not answer: {error}") from None
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return SocketConnection(made, self._timeout)

    def _receive(self, connection: SocketConnection, most: int) -> bytearray:
        return connection.recv_bytes(most, self._seconds_for(connection, most))

    def _seconds_for(self, connection: SocketConnection, most: int) -> float:
        """Wait until a message begins; return the time limit for receiving all of it."""
        if not connection.poll(self._timeout):
            raise BackendError(Cause.UNREACHABLE, f"the peer was silent for {self._timeout:g} s")
        return self._timeout + most / _MIN_SPEED

    def _read(self, active: ActiveTransfer, position: int) -> None:
        """Receive an object directly into its buffer.

        The next objects of the transfer are requested ahead. `backend_state` has their connection, the position after
        the last requested object, and whether this is the load's second connection. If an object is larger than
        expected, at most one byte more is sent. A bad object is received completely, so that the next ones can follow.
        """
        names, parts, found = active.transfer.names, active.parts[position], list[Header | BadObject]()
        pending, stop, has_moved = active.backend_state or (None, min(position + _MAX_AHEAD, len(names)), False)
        active.backend_state = None

        def choose_buffers(page: bytearray, num_left: int) -> list[memoryview]:
            try:
                header = Header.from_page(bytes(page))
                active.require(position, header)
                if num_left != active.lengths[position]:
                    raise BadObject(Cause.TRUNCATED)
                found.append(header)
            except BadObject as error:
                found.append(error)
            return _buffers_for(parts, num_left)

        def most(at: int) -> int:
            return PAGE_BYTES + active.lengths[at] + 1

        def send(numbered: _NumberedConnection) -> None:
            for each in range(position, stop):
                numbered.send("get", {"name": names[each].hex(), "most": most(each)})

        def take(connection: SocketConnection) -> None:
            size = most(position)
            connection.recv_into(PAGE_BYTES, choose_buffers, size, self._seconds_for(connection, size))

        def keep(numbered: _NumberedConnection) -> None:
            if position + 1 < stop:
                active.backend_state = numbered, stop, has_moved or pending not in (None, numbered)
            else:
                self._idle.append(numbered)

        self._receive_answer(send, take, keep, pending, not has_moved)
        header = found[-1]
        if isinstance(header, BadObject):
            raise header
        header.require_payload(parts)

    def _end_read(self, active: ActiveTransfer) -> None:
        if active.backend_state:  # some were requested and not read
            active.backend_state[0].connection.close()

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        return _sizes_in(self._ask("sizes", names=[name.hex() for name in names])[0])[: len(names)]

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        answer = self._ask("first", names=[name.hex() for name in names])[0]
        position, sizes = answer.get("position"), _sizes_in(answer)[:1]
        if type(position) is not int or not 0 <= position <= len(names) or (position < len(names)) != bool(sizes):
            raise BackendError(Cause.UNREACHABLE, "the peer: the answer has no valid position")
        return position, sizes

    def _remove(self, names: Sequence[bytes]) -> None:
        for first in range(0, len(names), _NAMES_PER_MESSAGE):
            self._ask("remove", names=[name.hex() for name in names[first : first + _NAMES_PER_MESSAGE]])

    def _remove_bad(self, names: Sequence[bytes]) -> None:
        """Have the peer delete those of these objects that it finds bad itself. Raises `BackendError`."""
        for first in range(0, len(names), _NAMES_PER_MESSAGE):
            self._ask("remove_bad", names=[name.hex() for name in names[first : first + _NAMES_PER_MESSAGE]])

    def names(self) -> Iterator[bytes]:
        data = bytes(self._ask("names", lambda connection: self._receive(connection, _MAX_NAMES_BYTES))[1])
        yield from (data[first : first + NAME_BYTES] for first in range(0, len(data) - NAME_BYTES + 1, NAME_BYTES))

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
        most = MAX_WHOLE_BYTES if num_bytes is None else num_bytes
        return bytes(self._ask("get", lambda each: self._receive(each, most), name=name.hex(), most=most)[1])

    def _put(self, name: bytes, data: bytes) -> None:
        """Send the peer a whole object, which it verifies. Raises `BackendError`."""
        self._put_pieces(name, [data])

    def _put_pieces(self, name: bytes, pieces: Sequence[bytes | memoryview]) -> None:
        self._ask("put", body=pieces, name=name.hex())


def _buffers_for(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Return buffers of `num_bytes` bytes in total: the parts, cut off at the end or followed by a new buffer."""
    room = []
    for part in parts:
        room.append(part[:num_bytes])
        num_bytes -= len(room[-1])
    return [*room, memoryview(bytearray(num_bytes))]


def _sizes_in(answer: dict[str, Any]) -> list[int]:
    """Return the sizes in an answer, up to the first invalid one. Raises `BackendError` if the list is missing."""
    sizes = answer.get("sizes")
    if not isinstance(sizes, list):
        raise BackendError(Cause.UNREACHABLE, "the peer: the answer has no list of sizes")
    return list(takewhile(lambda size: type(size) is int and size > 0, sizes))
