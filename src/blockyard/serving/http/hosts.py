"""Decides under which names requests may come: a web page can give this machine's address a name of its own.

A page of evil.example may re-point that name to 127.0.0.1 (DNS rebinding): for the browser the server is then a part
of the page's own site, and no rule about origins holds. What the browser still says is the name, in the header Host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ...arguments import shown
from ...errors import InvalidArgument
from ..errors import ApiError

_PORT = re.compile(r":[0-9]*$")
_NAME = re.compile(r"\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
#: Of the header, in an error.
_MAX_SHOWN = 100


def is_loopback(host: str) -> bool:
    """Say whether only programs of this machine can connect to a server that listens on `host`.

    A name counts by its addresses: a machine's own name is often one of loopback.
    """
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError):  # no server can listen there
        return False
    return all(_is_of_loopback(str(address[0])) for *_, address in found)


def _is_of_loopback(address: str) -> bool:
    plain = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(plain, "ipv4_mapped", None) or plain).is_loopback


def require_hosts(hosts: Sequence[str]) -> list[str]:
    """Names or addresses without a port, as they stand in the header Host; or "*", for all.

    Raises `InvalidArgument`, naming the one at fault.
    """
    for host in hosts:
        if not (isinstance(host, str) and _NAME.fullmatch(host)):
            wanted = "a name or an address without a port, as example.com or [::1], or '*' for all"
            raise InvalidArgument(f"allowed_hosts holds {shown(host)}; it must be {wanted}")
    return [host.lower() for host in hosts]


def known_hosts(host: str, allowed: Sequence[str], has_key: bool) -> list[str] | None:
    """Return the names under which requests may come to a server on `host`; None for any.

    allowed: names besides those of loopback and `host`. Without them it is any, but on loopback without a key.
    """
    allowed = require_hosts(allowed)
    if "*" in allowed or not (allowed or (is_loopback(host) and not has_key)):
        return None
    own = f"[{host}]" if ":" in host else host.lower()
    return list(dict.fromkeys([*_LOOPBACK, own, *allowed]))


class KnownHosts:
    """ASGI around the application: a request under another name gets 403, whatever its path. hosts: None for any."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or refuse it. O(headers)."""
        error = self._error(scope) if scope["type"] == "http" and self._hosts is not None else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        assert self._hosts is not None
        asked = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if asked is None or _name_of(asked) in self._hosts:  # a browser always sends it
            return None
        name = _name_of(asked)[:_MAX_SHOWN]
        message = f"the header Host is {shown(name)}; this server answers to {', '.join(self._hosts)} (--allowed-host)"
        return ApiError(403, message, "permission_error", code="host_not_allowed", close=True)


def _name_of(host: str) -> str:
    """Return a header's value without the port, in lower case."""
    return _PORT.sub("", host.strip().lower())
