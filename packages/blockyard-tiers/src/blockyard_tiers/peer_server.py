"""Serves the objects of a tier to other processes, which use `PeerTier`."""

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
from .peer import MAX_MESSAGE_BYTES, MAX_WHOLE_BYTES
from .tier import Cause, Transfer, require_name, require_names
from .worker import ActiveTransfer, BackendError, WorkingTier

_log = logging.getLogger(__name__)


class PeerServer:
    """Serves a tier's backend to peers, each connection in its own thread, until it is closed.

    Args:
        tier: a tier of the server's own, with the budget for everything that is stored. Other tiers, of engines on this
            machine, may use the same backend, such as a folder in memory.
        address: host:port to listen on.
        timeout: seconds for which a peer may be silent within a message, or accept nothing.
        max_peers: largest number of connections; more are closed.

    Raises:
        InvalidArgument: `address` is not host:port.
        OSError: the address cannot be used.
    """

    def __init__(self, tier: WorkingTier, address: str, timeout: float = 30.0, max_peers: int = 256) -> None:
        self._tier = tier
        self._timeout = timeout
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
        """End all connections and the threads. The tier stays open."""
        with self._lock:
            self._is_closed = True
            peers = dict(self._peers)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
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
                threading.Event().wait(0.1)  # out of file descriptors for now
                continue
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            made.setsockopt(
                socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
            )  # no thread waits forever for a machine that is down
            connection = SocketConnection(made, self._timeout)
            with self._lock:
                if self._is_closed or len(self._peers) >= self._max_peers:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True)
                self._peers[connection] = thread
                thread.start()

    def _serve(self, connection: SocketConnection) -> None:
        """Answer one peer until it disconnects or sends an invalid request."""
        try:
            while True:
                request = Message.of(connection.recv_bytes(MAX_MESSAGE_BYTES))
                answer, data = self._answer(connection, request)
                number = request.fields.get("number")
                connection.send_bytes(
                    pack("answer", {"cause": "", **answer, "number": number, "has_bytes": data is not None})
                )
                if data is not None:
                    connection.send_bytes(data)
        except ConnectionLost as error:
            _log.debug("a peer disconnected: %s", error)
        except (InvalidArgument, PeerMismatch, KeyError, TypeError, ValueError) as error:
            _log.warning("a peer sent an invalid request and is disconnected: %s", error)
        except Exception:
            _log.exception("a peer is disconnected after an error")
        finally:
            connection.close()
            with self._lock:
                self._peers.pop(connection, None)

    def _answer(self, connection: SocketConnection, request: Message) -> tuple[dict[str, Any], bytes | None]:
        kind, fields = request.kind, request.fields
        try:
            if kind == "get":
                return {}, self._get(_name(fields["name"]), require_int("most", fields["most"], 1, MAX_WHOLE_BYTES))
            if kind == "put":
                return {"cause": self._store(connection, _name(fields["name"]))}, None
            if kind == "sizes":
                return {"sizes": self._tier._sizes(_names(fields["names"]))}, None
            if kind == "first":
                position, sizes = self._tier._first(_names(fields["names"]))
                return {"position": position, "sizes": sizes}, None
            if kind == "remove":
                names = _names(fields["names"])
                with self._tier._lock:
                    self._tier._index.forget(names)
                self._tier.remove(names)
                return {}, None
            if kind == "remove_bad":
                self._tier.remove_bad(_names(fields["names"]))
                return {}, None
            if kind == "names":
                return {}, b"".join(self._tier.names())
        except BadObject as error:
            return {"cause": error.cause.value, "is_miss": True}, None
        except BackendError as error:
            return {"cause": error.cause.value, "text": str(error)}, None
        raise InvalidArgument(f"kind is {kind!r}; it must be get, put, sizes, first, remove, remove_bad or names")

    def _get(self, name: bytes, most: int) -> bytes:
        tier = self._tier
        try:
            data = tier.get(name, most if most < MAX_WHOLE_BYTES else None)
        except BadObject as error:
            tier._missed(name, error.cause)
            raise
        with tier._lock:
            tier._index.use([name])
        return data

    def _store(self, connection: SocketConnection, name: bytes) -> str:
        """Receive an object and store it within the tier's budget if it is valid; return the cause otherwise."""
        received = list[tuple[bytes, memoryview]]()

        def choose_buffers(page: bytearray, num_left: int) -> list[memoryview]:
            # numpy memory takes pages only when bytes arrive, whatever size was announced.
            received.append((bytes(page), np.empty(num_left, np.uint8).data))
            return [received[0][1]]

        connection.recv_into(PAGE_BYTES, choose_buffers, MAX_WHOLE_BYTES)
        page, payload = received[0]
        try:
            header = require_parts(page, [payload], name)
        except BadObject as error:
            return error.cause.value
        if len(payload) > self._tier._index.max_bytes:
            return Cause.FULL.value
        active = ActiveTransfer(
            Transfer(0, header.layout, [name], [header.tokens], [payload]), False, [[payload]], 0.0, known_header=header
        )
        causes = self._tier._store_all(active)
        return causes[0].value if causes else ""


def _name(text: str) -> bytes:
    return require_name("name", bytes.fromhex(text))


def _names(texts: Sequence[str]) -> list[bytes]:
    names = [bytes.fromhex(text) for text in texts]
    require_names("names", names)
    return names
