"""A request's body, bounded while it is read: in bytes and in time; and one with two lengths ends its connection."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError, invalid, timed_out
from ..limits import ServerLimits


class OneLength:
    """ASGI around the application: a request with Content-Length and Transfer-Encoding is the last of its connection.

    The second of them holds (RFC 9112, 6.3). A proxy before the server may have gone by the first, and sent as part of
    the body what would be read here as the next request, of another client perhaps.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on. O(headers)."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        has_two = {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope.get("headers", ())}
        await self._app(scope, receive, send_last if has_two else send)


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """The body. Raises `ApiError`: 413 for one beyond the limit, 408 for one that comes too slowly, 415 for no JSON.

    No more than the limit and one piece of the network's is ever held.
    """
    _require_json(request)
    _require_declared_size(request, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise timed_out(f"the body did not arrive within {limits.body_seconds:g} seconds", 408) from None
    except ClientDisconnect:
        raise invalid("the client went away") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _require_json(request: Request) -> None:
    # A web page may send any other type to this machine from a browser without asking first.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = "the header Content-Type must be application/json (curl -H 'Content-Type: application/json')"
        raise ApiError(415, message, close=True)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "a body must come as it is: content encodings are not supported", close=True)


def _require_declared_size(request: Request, max_bytes: int) -> None:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes"
    return ApiError(413, message, code="request_too_large", close=True)
