"""A peer is a tier: it serves the objects of its memory or disk, over a socket and in messages of the wire.

`PeerServer` answers, and several engines may ask it at once:

    client                        server
    get(name, most)      ───────▶         the first bytes of an object, `most` of them
                         ◀─────── answer  the cause of a miss, or how many bytes come; then these
    put(name)            ───────▶         and then the object
    sizes, remove(names) ───────▶
    remove_bad(names)    ───────▶         removes those that it finds bad itself
    names()              ───────▶

What comes is what lies in the peer's place, page and payload. The one who asked verifies it, as of any other place; the
one who is given an object to keep verifies it too. Questions are numbered, and an answer has its question's number: a
connection that brings another one is out of step, and closed. Between machines there is no password and no encryption.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blockyard.errors import InvalidArgument, PeerMismatch
from blockyard.wire import ConnectionLost, Message, SocketConnection, pack

from .addresses import host_and_port
from .header import PAGE_BYTES, BadObject, Header
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
#: Objects that are asked for at once: this many questions fit where a socket keeps them.
_MOST_AHEAD = 64
_Take = Callable[[SocketConnection], Any]
_Pieces = Sequence[bytes | memoryview]


class _OutOfStep(ConnectionLost):
    """This says that an answer is to another question than the one that was asked."""


@dataclass(slots=True, eq=False)
class _Line:
    """A line is a connection that counts: an answer has the number of its question."""

    connection: SocketConnection
    num_asked: int = 0
    num_told: int = 0

    def ask(self, kind: str, fields: dict[str, Any], body: _Pieces = ()) -> None:
        self.connection.send_bytes(pack(kind, {**fields, "number": self.num_asked}))
        self.num_asked += 1
        if body:
            self.connection.send_pieces(body)

    def fields(self, answer: bytearray) -> dict[str, Any]:
        """Reads the next answer. Raises `PeerMismatch`, `_OutOfStep`."""
        fields = Message.of(answer).require("answer").fields
        if fields.get("number") != self.num_told:
            raise _OutOfStep("an answer came that is to another question")
        self.num_told += 1
        return fields


#: Connections of a process that forked this one: they are its own, and are not shut down here.
_inherited: list[_Line] = []


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
        self._idle: list[_Line] = []
        super().__init__(url, ObjectIndex(2**60, max_known), **more)
        self._start()

    def close(self, timeout: float = 10.0) -> bool:
        """End the threads and the connections. See `Tier.close`."""
        has_ended = super().close(timeout)
        while self._idle:
            self._idle.pop().connection.close()
        return has_ended

    def _begin_in_child(self) -> None:
        _inherited.extend([*self._idle, *(task.held[0] for task in self._running.values() if task.held)])
        super()._begin_in_child()
        self._idle = []

    def _ask(
        self, kind: str, take: _Take | None = None, body: _Pieces = (), **fields: Any
    ) -> tuple[dict[str, Any], Any]:
        """Ask the peer; returns the fields of its answer, what `take` makes of the message behind. See `_told`."""

        return self._told(lambda line: line.ask(kind, fields, body), take, self._idle.append)

    def _told(
        self,
        send: Callable[[_Line], None],
        take: _Take | None,
        keep: Callable[[_Line], None],
        asked: _Line | None = None,
        may_move: bool = True,
    ) -> tuple[dict[str, Any], Any]:
        """Take an answer from `asked`, or send on another connection first; `keep` gets what is sound then.

        A connection that has waited may have been closed meanwhile, or be out of step, which says nothing of the peer:
        then another one is made, once, if it may move. Raises `BadObject` for a miss, `PlaceError`.
        """
        while True:
            line, is_new = asked, False
            if line is None:
                try:
                    line = self._idle.pop()
                except IndexError:
                    line, is_new = _Line(self._connect()), True
            connection = line.connection
            try:
                if asked is None:
                    send(line)
                answer = line.fields(self._received(connection, MOST_ASKED_BYTES))
                data = take(connection) if take is not None and answer.get("has_bytes") else b""
                cause = Cause(answer["cause"]) if answer["cause"] else None
                if take is not None and cause is None and not answer.get("has_bytes"):
                    raise InvalidArgument("an answer has neither bytes nor a cause")
            except (ConnectionLost, InvalidArgument, PeerMismatch, KeyError, TypeError, ValueError) as error:
                connection.close()
                if is_new or not may_move or not isinstance(error, ConnectionLost):
                    raise PlaceError(Cause.UNREACHABLE, f"the peer: {error}") from None
                asked = None
                continue
            except BaseException:
                connection.close()
                raise
            keep(line)
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

    def _received(self, connection: SocketConnection, most: int) -> bytearray:
        return connection.recv_bytes(most, self._seconds_for(connection, most))

    def _seconds_for(self, connection: SocketConnection, most: int) -> float:
        """Wait until a message begins; returns the seconds in which all of it has to come."""
        if not connection.poll(self._timeout):
            raise PlaceError(Cause.UNREACHABLE, f"the peer was silent for {self._timeout:g} s")
        return self._timeout + most / _LEAST_SPEED

    def _read(self, task: Task, position: int) -> None:
        """Receives an object where it belongs; the next ones of the task are asked for before, on the connection that
        is held with their end, and whether it is the load's second. Of one that is larger than is wanted a byte more
        comes, and no more; of a bad one all comes too, so that the next ones can follow."""
        names, parts, found = task.job.names, task.parts[position], list[Header | BadObject]()
        asked, stop, has_moved = task.held or (None, min(position + _MOST_AHEAD, len(names)), False)
        task.held = None

        def place(page: bytearray, num_left: int) -> list[memoryview]:
            try:
                header = Header.from_page(bytes(page))
                task.require(position, header)
                if num_left != task.length(position):
                    raise BadObject(Cause.TRUNCATED)
                found.append(header)
            except BadObject as error:
                found.append(error)
            return _room(parts, num_left)

        def most(place: int) -> int:
            return PAGE_BYTES + task.length(place) + 1

        def send(line: _Line) -> None:
            for each in range(position, stop):
                line.ask("get", {"name": names[each].hex(), "most": most(each)})

        def take(connection: SocketConnection) -> None:
            size = most(position)
            connection.recv_into(PAGE_BYTES, place, size, self._seconds_for(connection, size))

        def keep(line: _Line) -> None:
            if position + 1 < stop:
                task.held = line, stop, has_moved or asked not in (None, line)
            else:
                self._idle.append(line)

        self._told(send, take, keep, asked, not has_moved)
        told = found[-1]
        if isinstance(told, BadObject):
            raise told
        told.require_payload(parts)

    def _let_go(self, task: Task) -> None:
        if task.held:  # some were asked for, and are not read
            task.held[0].connection.close()

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        sizes: list[int] = []
        found = self._ask("sizes", names=[name.hex() for name in names])[0].get("sizes")
        if not isinstance(found, list):
            raise PlaceError(Cause.UNREACHABLE, "the peer: an answer has no list of sizes")
        for size in found:
            if type(size) is not int or size < 1:
                break
            sizes.append(size)
        return sizes[: len(names)]

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes all of these objects; those that are not there are no error. Raises `PlaceError`."""
        for first in range(0, len(names), _A_GO):
            self._ask("remove", names=[name.hex() for name in names[first : first + _A_GO]])

    def remove_bad(self, names: Sequence[bytes]) -> None:
        """Has the peer remove those of these objects that it finds bad itself. Raises `PlaceError`."""
        for first in range(0, len(names), _A_GO):
            self._ask("remove_bad", names=[name.hex() for name in names[first : first + _A_GO]])

    def names(self) -> Iterator[bytes]:
        """Goes over the names of all objects at the peer. Raises `PlaceError`."""
        data = bytes(self._ask("names", lambda connection: self._received(connection, _MOST_NAMES_BYTES))[1])
        yield from (data[first : first + NAME_BYTES] for first in range(0, len(data) - NAME_BYTES + 1, NAME_BYTES))

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole object or its first bytes, unverified. Raises `BadObject`, `PlaceError`."""
        most = MOST_OBJECT_BYTES if num_bytes is None else num_bytes
        return bytes(self._ask("get", lambda each: self._received(each, most), name=name.hex(), most=most)[1])

    def put(self, name: bytes, data: bytes) -> None:
        """Give the peer a whole object, which it verifies. Raises `PlaceError`."""
        self._put_pieces(name, [data])

    def _put_pieces(self, name: bytes, pieces: Sequence[bytes | memoryview]) -> None:
        self._ask("put", body=pieces, name=name.hex())


def _room(parts: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns room for `num_bytes` bytes: the parts, as far as they go, and some more."""
    room = []
    for part in parts:
        room.append(part[:num_bytes])
        num_bytes -= len(room[-1])
    return [*room, memoryview(bytearray(num_bytes))]
