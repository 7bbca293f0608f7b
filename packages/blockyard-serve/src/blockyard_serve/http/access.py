"""Decides who may ask: under which names of this machine, from which web pages, and with which key.

A page of evil.example may re-point its name to 127.0.0.1 (DNS rebinding): for the browser the server is then a part of
the page's own site, and no rule about origins holds. What the browser still says is the name, in the header Host. Pages
of other origins may use the server where they were named (CORS); by default there are none.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from blockyard.arguments import shown
from blockyard.errors import InvalidArgument
from blockyard.tenants import Roster

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
    """Return names or addresses without a port, as they stand in the header Host; or "*", for all.

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


#: What a page may read of an answer besides its body.
_SHOWN_HEADERS = ["X-Request-ID", "Retry-After"]
_MAX_AGE_SECONDS = 600


def require_origins(origins: Sequence[str]) -> list[str]:
    """Origins as browsers send them: scheme, host and port, nothing behind; or "*" alone, for all pages.

    Raises `InvalidArgument`, naming the one at fault: a browser compares them letter by letter.
    """
    for origin in origins:
        if origin != "*" and not _is_origin(origin):
            wanted = "scheme, host and port, as http://localhost:3000, in lower case and without a path"
            raise InvalidArgument(f"cors_origins holds {shown(origin)}; an origin is {wanted}, or '*' for all")
    return list(dict.fromkeys(origins))


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Answer browsers that ask for pages of these origins. Cookies play no part; a key is sent by the page."""
    allowed = require_origins(origins)
    if allowed:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=_SHOWN_HEADERS,
            max_age=_MAX_AGE_SECONDS,
        )


def _is_origin(origin: object) -> bool:
    if not isinstance(origin, str) or not origin.isascii() or origin != origin.lower():
        return False
    try:
        parts = urlsplit(origin)
        port = parts.port
    except ValueError:
        return False
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return bool(parts.scheme and host) and origin == f"{parts.scheme}://{host}" + f":{port}" * (port is not None)


_MAX_KEY_BYTES = 4096
_TENANT_HEADER = "x-tenant"


def read_key_file(path: str | Path) -> str:
    """Return the key in a file, without the white space around it. Raises `InvalidArgument` if there is none."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_KEY_BYTES + 1)
        return require_key(f"the key in {path}", content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the key file {path} cannot be read: {error}") from None


def require_key(name: str, key: str) -> str:
    """Return a key that can be sent in a header. Raises `InvalidArgument`, which does not show it."""
    stripped = key.strip()
    if not stripped or len(stripped) > _MAX_KEY_BYTES or not (stripped.isascii() and stripped.isprintable()):
        raise InvalidArgument(f"{name} must be 1 to {_MAX_KEY_BYTES} printable ASCII characters")
    return stripped


class KeyGuard:
    """Lets requests with a key pass, and says whose they are. Only digests of keys are kept, and written nowhere.

    key: the server's own, None for none. tenant_keys: of tenants, by name. Raises `InvalidArgument` for a key that two
    have.
    """

    def __init__(self, key: str | None, tenant_keys: Mapping[str, str] | None = None) -> None:
        self._digest = None if key is None else _digest(require_key("the API key", key))
        self._tenants: dict[bytes, str] = {}
        for name, text in (tenant_keys or {}).items():
            digest = _digest(require_key(f"the API key of {name!r}", text))
            if digest == self._digest or self._tenants.setdefault(digest, name) != name:
                other = "the server's own" if digest == self._digest else f"that of {self._tenants[digest]!r}"
                raise InvalidArgument(f"the API key of tenant {name!r} is {other}; each must have one of its own")

    @property
    def has_key(self) -> bool:
        """Say whether requests need a key."""
        return self._digest is not None or bool(self._tenants)

    def __call__(self, request: Request) -> None:
        """Raise `ApiError` (401) for a request without a key, if there are any; note whose it is (`tenant_of`).

        A tenant's key says it; with the server's own, or without any, the header X-Tenant does (403 where both do, and
        differ).
        """
        named, digest = request.headers.get(_TENANT_HEADER), _bearer(request)
        owner = self._tenants.get(digest)
        if owner is None:
            self.own(request)
        elif named not in (None, owner):
            message = f"the API key is of another tenant than {shown(named)}, which the header X-Tenant names"
            raise ApiError(403, message, "permission_error", code="tenant_not_allowed")
        request.state.tenant = owner or named

    def own(self, request: Request) -> None:
        """Raise `ApiError` (401) for a request without the server's own key: of what concerns all tenants."""
        if self.has_key and not (self._digest and hmac.compare_digest(_bearer(request), self._digest)):
            raise ApiError(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")


def require_tenants(roster: Roster, names: Iterable[str]) -> None:
    """Raise `InvalidArgument` for a name that is none of the tenants, and for one whose keys have no salt."""
    for name in names:
        roster.keys_of(name, ())


def tenant_of(request: Request) -> str | None:
    """Return the tenant whose request it is, which a `KeyGuard` has passed; None where nothing says it."""
    named: str | None = request.state.tenant
    return named


def _bearer(request: Request) -> bytes:
    """Return the digest of the key that came with a request, b"" for none."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return _digest(key.strip()) if kind.lower() == "bearer" else b""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
