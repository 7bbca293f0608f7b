"""Sockets of a server. They are opened first, so that a port in use is reported before a model is loaded."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import Any

from blockyard.arguments import require_int, require_str
from blockyard.errors import InvalidArgument

#: "localhost" may resolve to an IPv6 address on a machine without IPv6.
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_Address = tuple[socket.AddressFamily, tuple[Any, ...]]


def open_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of `host`, all with the same port. They do not listen yet.

    Raises `InvalidArgument` if an address cannot be bound; then no socket stays open.

    Args:
        host: name or address; "" for all addresses of this machine.
        port: port; 0 for any free one.
    """
    require_str("host", host)
    require_int("port", port, 0, 65535)
    with ExitStack() as held:  # closes all if one fails
        try:
            opened = _opened(_addresses(host, port), held)
        except (OSError, UnicodeError) as error:
            raise cannot_listen(host, port, error) from None
        held.pop_all()
    return opened


def cannot_listen(host: str, port: int, error: Exception) -> InvalidArgument:
    """Return the error for an address that cannot be bound."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InvalidArgument(f"host is {host!r} and port is {port}; cannot listen there: {why}")


def _addresses(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((socket.AddressFamily(family), address) for family, _, _, _, address in found))


def _opened(addresses: list[_Address], held: ExitStack) -> list[socket.socket]:
    opened: list[socket.socket] = []
    missing = OSError("it has no address")
    for family, address in addresses:
        port = opened[0].getsockname()[1] if opened else address[1]
        try:
            opened.append(held.enter_context(_bound(family, (address[0], port, *address[2:]))))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                raise
            missing = error
    if not opened:
        raise missing
    return opened


def _bound(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    # asyncio turns Nagle's algorithm off only if the protocol is given. Otherwise clients that delay acknowledgements,
    # as most do, would receive each small chunk 40 ms late.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a previous server linger
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has its own socket
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
