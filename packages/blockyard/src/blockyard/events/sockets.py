"""ZeroMQ sockets, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..arguments import require_str, require_unicode, shown
from ..errors import InvalidArgument, MissingExtra, PublisherError

try:
    import zmq
except ImportError as error:
    raise MissingExtra(f"KV events need {error.name}: pip install 'blockyard[events]'") from error

__all__ = ["SENT_FROM_PLACE", "bind_socket", "connect_socket", "require_endpoint", "zmq"]

LAST_PORT = 65535
#: Largest request or topic; the connection of a larger one is closed.
MAX_REQUEST_BYTES = 2**16
#: Frames of at least this many bytes are sent without a copy, and released by a thread of pyzmq.
SENT_FROM_PLACE = 2**18


def bind_socket(
    context: Any, kind: int, name: str, endpoint: str, linger: int, options: Mapping[int, int] | None = None
) -> Any:
    """Return a bound socket.

    Args:
        context: ZeroMQ context.
        kind: type of the socket.
        name: argument, for errors.
        endpoint: where to bind it.
        linger: milliseconds for sending the last messages when it is closed.
        options: further options of ZeroMQ.

    Raises:
        PublisherError: the endpoint cannot be bound, or the process may not open more sockets.
    """
    socket = _made(context, kind, name, endpoint)
    socket.setsockopt(zmq.LINGER, linger)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    for option, value in (options or {}).items():
        socket.setsockopt(option, value)
    socket.copy_threshold = SENT_FROM_PLACE
    return _opened(socket, socket.bind, "bound", name, endpoint)


def connect_socket(context: Any, kind: int, name: str, endpoint: str, max_message_bytes: int) -> Any:
    """Return a connected socket. A peer that sends more than `max_message_bytes` in a message is disconnected.

    Raises `PublisherError` if the endpoint is malformed, or the process may not open more sockets.
    """
    socket = _made(context, kind, name, endpoint)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    return _opened(socket, socket.connect, "connected to", name, endpoint)


def require_endpoint(name: str, endpoint: object) -> str:
    """Return `endpoint` if it looks like an address. Raises `InvalidArgument` otherwise."""
    given = require_unicode(name, require_str(name, endpoint))
    if "://" not in given:
        raise InvalidArgument(f"{name} is {shown(given)}; it must begin with tcp://, as tcp://127.0.0.1:5557 does")
    if given.startswith("inproc://"):
        raise InvalidArgument(f"{name} is {shown(given)}; no other process can connect to inproc://")
    port = given.rpartition(":")[2]
    if given.startswith("tcp://") and port != "*" and not _is_port(port):
        raise InvalidArgument(
            f"{name} is {shown(given)}; it must end with a port from 0 to {LAST_PORT}, as tcp://127.0.0.1:5557 does"
        )
    return given


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(LAST_PORT)) and int(text) <= LAST_PORT


def _made(context: Any, kind: int, name: str, endpoint: object) -> Any:
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise PublisherError(f"{name} is {shown(endpoint)}; no socket can be opened: {error} (ulimit -n)") from error


def _opened(socket: Any, act: Callable[[str], None], verb: str, name: str, endpoint: str) -> Any:
    try:
        act(require_endpoint(name, endpoint))
    except BaseException as error:
        socket.close()
        if isinstance(error, zmq.ZMQError):
            raise PublisherError(f"{name} is {shown(endpoint)}; it cannot be {verb}: {error}") from error
        raise
    return socket
