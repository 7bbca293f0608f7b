"""Request bodies, limited in size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError, invalid, timed_out
from ..limits import ServerLimits


class OneLength:
    """ASGI middleware that closes the connection after a request with both Content-Length and Transfer-Encoding.

    Transfer-Encoding applies (RFC 9112, 6.3). If a proxy in front applied Content-Length, the bytes after this body may
    be part of it, and must not be read as the next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        has_two = {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope.get("headers", ())}
        await self._app(scope, receive, send_last if has_two else send)


async def read_body(request: Request, limits: ServerLimits) -> bytes:
    """Return the body of a request. Holds at most the limit and one network read.

    Raises `ApiError`: 413 if it is too large, 408 if it arrives too slowly, 415 if it is not JSON.
    """
    _require_json(request)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.max_body_bytes:
        raise _too_large(limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_seconds):
            return await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise timed_out(f"the body did not arrive within {limits.body_seconds:g} seconds", 408) from None
    except ClientDisconnect:
        raise invalid("the client disconnected") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _require_json(request: Request) -> None:
    # Browsers let any web page send other types to this machine without a CORS preflight.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = "the header Content-Type must be application/json (curl -H 'Content-Type: application/json')"
        raise ApiError(415, message, close=True)
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "the header Content-Encoding is not supported; send the body uncompressed", close=True)


def _too_large(max_bytes: int) -> ApiError:
    message = f"the body is larger than {max_bytes} bytes (--max-body-bytes)"
    return ApiError(413, message, code="request_too_large", close=True)
