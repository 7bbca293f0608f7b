"""A server gives peers the objects of a place, and keeps theirs: `PeerTier` asks it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from blockyard.arguments import require_int
from blockyard.errors import InvalidArgument, PeerMismatch
from blockyard.wire import ConnectionLost, Message, SocketConnection, pack

from .addresses import host_and_port
from .header import PAGE_BYTES, BadObject, require_parts
from .peer import MOST_ASKED_BYTES, MOST_OBJECT_BYTES
from .tier import Cause, Job, require_name, require_names
from .worker import PlaceError, Task, WorkingTier

_log = logging.getLogger(__name__)


class PeerServer:
    """Serves a tier's place to peers, each connection in a thread of its own, until it is closed.

    tier: a tier of the server's own, with the budget for all that is kept; other tiers, of engines on this machine,
    may be over the same place, such as a folder in memory. address: host:port to listen on. limit: seconds that a peer
    may be silent in the middle of a message, or take nothing. max_peers: connections at once; more are closed.
    Raises `InvalidArgument`, and `OSError` for an address that cannot be had.
    """

    def __init__(self, tier: WorkingTier, address: str, limit: float = 30.0, max_peers: int = 256) -> None:
        self._tier = tier
        self._limit = limit
        self._max_peers = require_int("max_peers", max_peers, 1, 2**16)
        self._peers: dict[SocketConnection, threading.Thread] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        host, port = host_and_port("address", address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._accepting = threading.Thread(target=self._accept, name=f"peers of {tier.name}", daemon=True)
        self._accepting.start()

    def close(self, timeout: float = 10.0) -> None:
        """End all connections and the threads; the tier stays open."""
        with self._lock:
            self._is_closed = True
            peers = dict(self._peers)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        self._listener.close()
        for connection in peers:
            connection.close()
        for thread in (self._accepting, *peers.values()):
            thread.join(timeout)

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                threading.Event().wait(0.1)  # no more files for now
                continue
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that went leaves no thread behind
            connection = SocketConnection(made, self._limit)
            with self._lock:
                if self._is_closed or len(self._peers) >= self._max_peers:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True)
                self._peers[connection] = thread
                thread.start()

    def _serve(self, connection: SocketConnection) -> None:
        """Answers one peer until it leaves, or says what is no request."""
        try:
            while True:
                request = Message.of(connection.recv_bytes(MOST_ASKED_BYTES))
                answer, data = self._answer(connection, request)
                number = request.fields.get("number")
                connection.send_bytes(
                    pack("answer", {"cause": "", **answer, "number": number, "has_bytes": data is not None})
                )
                if data is not None:
                    connection.send_bytes(data)
        except ConnectionLost as error:
            _log.debug("a peer has left: %s", error)
        except (InvalidArgument, PeerMismatch, KeyError, TypeError, ValueError) as error:
            _log.warning("a peer asked for what is not served, and is left: %s", error)
        except Exception:
            _log.exception("a peer is left after an error")
        finally:
            connection.close()
            with self._lock:
                self._peers.pop(connection, None)

    def _answer(self, connection: SocketConnection, request: Message) -> tuple[dict[str, Any], bytes | None]:
        kind, fields = request.kind, request.fields
        try:
            if kind == "get":
                return {}, self._got(_name(fields["name"]), require_int("most", fields["most"], 1, MOST_OBJECT_BYTES))
            if kind == "put":
                return {"cause": self._kept(connection, _name(fields["name"]))}, None
            if kind == "sizes":
                return {"sizes": self._tier._sizes(_names(fields["names"]))}, None
            if kind == "remove":
                return self._removed(_names(fields["names"])), None
            if kind == "remove_bad":
                self._tier.remove_bad(_names(fields["names"]))
                return {}, None
            if kind == "names":
                return {}, b"".join(self._tier.names())
        except BadObject as error:
            return {"cause": error.cause.value, "is_miss": True}, None
        except PlaceError as error:
            return {"cause": error.cause.value, "text": str(error)}, None
        raise InvalidArgument(f"kind is {kind!r}; it must be get, put, sizes, remove, remove_bad or names")

    def _got(self, name: bytes, most: int) -> bytes:
        tier = self._tier
        try:
            data = tier.get(name, most if most < MOST_OBJECT_BYTES else None)
        except BadObject as error:
            tier._missed(name, error.cause)
            raise
        with tier._lock:
            tier._index.use([name])
        return data

    def _kept(self, connection: SocketConnection, name: bytes) -> str:
        """Receives an object and stores it, if it is whole, within the tier's budget; returns why it was not."""
        come = list[tuple[bytes, memoryview]]()

        def place(page: bytearray, num_left: int) -> list[memoryview]:
            # Pages that are touched when bytes come, whatever was announced; a bytearray that grows is copied.
            come.append((bytes(page), np.empty(num_left, np.uint8).data))
            return [come[0][1]]

        connection.recv_into(PAGE_BYTES, place, MOST_OBJECT_BYTES)
        page, payload = come[0]
        try:
            header = require_parts(page, [payload], name)
        except BadObject as error:
            return error.cause.value
        if len(payload) > self._tier._index.max_bytes:
            return Cause.FULL.value
        task = Task(
            Job(0, header.layout, [name], [header.tokens], [payload]), False, [[payload]], 0.0, known_header=header
        )
        causes = self._tier._store_all(task)
        return causes[0].value if causes else ""

    def _removed(self, names: list[bytes]) -> dict[str, Any]:
        with self._tier._lock:
            self._tier._index.forget(names)
        self._tier.remove(names)
        return {}


def _name(text: str) -> bytes:
    return require_name("name", bytes.fromhex(text))


def _names(texts: Sequence[str]) -> list[bytes]:
    names = [bytes.fromhex(text) for text in texts]
    require_names("names", names)
    return names
