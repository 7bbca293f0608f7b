"""Web pages of other origins that may use the server from a browser (CORS); by default there are none."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ...arguments import shown
from ...errors import InvalidArgument

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
