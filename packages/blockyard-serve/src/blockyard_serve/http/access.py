"""Access control: which host names a request may use, which web pages may send it, and with which API key.

A page on evil.example may point its name to 127.0.0.1 (DNS rebinding). To the browser the server is then part of
that site, and no rule about origins applies. The header Host still has the name, so it is checked. Web pages of
other origins may use the server only if they are listed (CORS).
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
#: Characters of the header that an error shows.
_MAX_SHOWN = 100


def is_loopback(host: str) -> bool:
    """Return whether only programs on this machine can connect to a server on `host`.

    Names are resolved: a machine's own name often has a loopback address.
    """
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, ValueError):  # no server can listen there
        return False
    plain = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    return all((getattr(each, "ipv4_mapped", None) or each).is_loopback for each in plain)


def require_hosts(hosts: Sequence[str]) -> list[str]:
    """Return host names in lower case. Each is a name or address without port, as in the header Host, or "*" for all.

    Raises `InvalidArgument` for an invalid name.
    """
    for host in hosts:
        if not (isinstance(host, str) and _NAME.fullmatch(host)):
            wanted = "a name or an address without a port, as example.com or [::1], or '*' for all"
            raise InvalidArgument(f"allowed_hosts holds {shown(host)}; it must be {wanted}")
    return [host.lower() for host in hosts]


def known_hosts(host: str, allowed: Sequence[str], has_key: bool) -> list[str] | None:
    """Return the host names under which requests may come; None for any.

    Args:
        host: address on which the server listens.
        allowed: names besides `host` and those of loopback. Without any, all names are allowed, except on loopback
            without a key.
        has_key: whether requests need a key.
    """
    allowed = require_hosts(allowed)
    if "*" in allowed or not (allowed or (is_loopback(host) and not has_key)):
        return None
    own = f"[{host}]" if ":" in host else host.lower()
    return list(dict.fromkeys([*_LOOPBACK, own, *allowed]))


class KnownHosts:
    """ASGI middleware that answers requests for other host names with 403.

    Args:
        hosts: allowed names; None for any.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" and self._hosts is not None else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        assert self._hosts is not None
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if host is None:  # a browser always sends it
            return None
        name = _PORT.sub("", host.strip().lower())
        if name in self._hosts:
            return None
        allowed = ", ".join(self._hosts)
        message = f"the header Host is {shown(name[:_MAX_SHOWN])}; allowed are {allowed} (--allowed-host adds names)"
        return ApiError(403, message, "permission_error", code="host_not_allowed", close=True)


#: Headers of responses that web pages of other origins may read.
_SHOWN_HEADERS = ["X-Request-ID", "Retry-After"]
_MAX_AGE_SECONDS = 600


def require_origins(origins: Sequence[str]) -> list[str]:
    """Return web origins without duplicates: scheme, host and port as browsers send them, or "*" for all.

    Raises `InvalidArgument` for an invalid origin. Browsers compare origins letter by letter.
    """
    for origin in origins:
        if origin != "*" and not _is_origin(origin):
            wanted = "scheme, host and port, as http://localhost:3000, in lower case and without a path"
            raise InvalidArgument(f"cors_origins holds {shown(origin)}; an origin is {wanted}, or '*' for all")
    return list(dict.fromkeys(origins))


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Allow web pages of these origins to use the application. Cookies are not used; the page sends the key."""
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
    """Return the key in a file, without surrounding white space. Raises `InvalidArgument` if there is none."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_KEY_BYTES + 1)
        return require_key(f"the key in {path}", content.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the key file {path} cannot be read: {error}") from None


def require_key(name: str, key: str) -> str:
    """Return `key` if it can be sent in a header. Raises `InvalidArgument`, which does not show it."""
    stripped = key.strip()
    if not stripped or len(stripped) > _MAX_KEY_BYTES or not (stripped.isascii() and stripped.isprintable()):
        raise InvalidArgument(f"{name} must be 1 to {_MAX_KEY_BYTES} printable ASCII characters")
    return stripped


class KeyGuard:
    """Checks API keys and identifies tenants by them. Stores only digests of keys.

    Raises `InvalidArgument` if two keys are equal.

    Args:
        key: the server's own key, if any.
        tenant_keys: keys of tenants by name.
    """

    def __init__(self, key: str | None, tenant_keys: Mapping[str, str] | None = None) -> None:
        self._digest = None if key is None else _digest(require_key("the API key", key))
        self._tenants: dict[bytes, str] = {}
        for name, text in (tenant_keys or {}).items():
            digest = _digest(require_key(f"the API key of {name!r}", text))
            if digest == self._digest or self._tenants.setdefault(digest, name) != name:
                other = "the server's own" if digest == self._digest else f"that of {self._tenants[digest]!r}"
                raise InvalidArgument(
                    f"the API key of tenant {name!r} equals {other}; give each tenant a different key"
                )

    @property
    def has_key(self) -> bool:
        """True if requests need a key."""
        return self._digest is not None or bool(self._tenants)

    def __call__(self, request: Request) -> None:
        """Check the key of a request, and store its tenant (`tenant_of`).

        A tenant's key identifies the tenant. With the server's own key, or without any, the header X-Tenant does.
        Raises `ApiError`: 401 without a valid key; 403 if X-Tenant names another tenant than the key.
        """
        named, digest = request.headers.get(_TENANT_HEADER), _bearer(request)
        owner = self._tenants.get(digest)
        if owner is None:
            self.require_server_key(request)
        elif named not in (None, owner):
            message = f"the header X-Tenant is {shown(named)}, but the API key belongs to another tenant"
            raise ApiError(403, message, "permission_error", code="tenant_not_allowed")
        request.state.tenant = owner or named

    def require_server_key(self, request: Request) -> None:
        """Raise `ApiError` (401) unless a request has the server's own key, for routes that concern all tenants."""
        if self.has_key and not (self._digest and hmac.compare_digest(_bearer(request), self._digest)):
            raise ApiError(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")


def require_tenants(roster: Roster, names: Iterable[str]) -> None:
    """Raise `InvalidArgument` for a name that is not a tenant, or whose keys have no salt."""
    for name in names:
        roster.keys_of(name, ())


def tenant_of(request: Request) -> str | None:
    """Return the tenant of a request that a `KeyGuard` has checked; None if it is unknown."""
    named: str | None = request.state.tenant
    return named


def _bearer(request: Request) -> bytes:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return _digest(key.strip()) if kind.lower() == "bearer" else b""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
