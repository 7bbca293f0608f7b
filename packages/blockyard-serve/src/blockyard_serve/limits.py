"""Limits on the requests of one client and of all clients together."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on everything that a client could make large or slow.

    Attributes:
        max_body_bytes: size of a request body, counted while it is read.
        max_waiting: completions that may wait in addition to those that run; further ones get 429.
        max_completions: completions of one request, prompts times `n`.
        max_tokens: new tokens of a completion; None allows all that fit into the context.
        default_max_tokens: new tokens of a chat that sets no limit; None uses `max_tokens`.
        max_connections: open connections; uvicorn answers further ones with 503.
        header_seconds: time for a client to send its headers.
        body_seconds: time for a client to send its body.
        client_seconds: time for a client to receive a response.
        request_seconds: time until a response is complete.
        drain_seconds: time for running requests to end when the server stops.
        retry_after_seconds: `Retry-After` of refused requests.

    Raises:
        InvalidArgument: for a value outside its limits.
    """

    max_body_bytes: int = 2**20
    max_waiting: int = 128
    max_completions: int = 64
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    max_connections: int = 512
    header_seconds: float = 15.0
    body_seconds: float = 15.0
    client_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    retry_after_seconds: int = 1

    def __post_init__(self) -> None:
        for name, low in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in {"max_tokens", "default_max_tokens"}:
                require_int(name, value, low, 2**31 - 1)
        for name in _SECONDS:
            if require_number(name, getattr(self, name)) <= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be above 0")


_INTEGERS = {
    "max_body_bytes": 1024,
    "max_waiting": 0,
    "max_completions": 1,
    "max_tokens": 1,
    "default_max_tokens": 1,
    "max_connections": 1,
    "retry_after_seconds": 1,
}
_SECONDS = ("header_seconds", "body_seconds", "client_seconds", "request_seconds", "drain_seconds")
