"""What one client, and all of them together, may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

from blockyard.arguments import require_int, require_number
from blockyard.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds of everything that a client could make large or slow.

    max_body_bytes: of a request; counted while it is read.
    max_waiting: completions that may wait beyond those that run at once; more are answered with 429.
    max_completions: of one request: prompts times `n`.
    max_tokens: new tokens of a completion; the room in the context if None.
    default_max_tokens: of a chat that does not say; the room in the context, within max_tokens, if None.
    max_connections: open at once; uvicorn answers more with 503.
    header_seconds, body_seconds: until a client has sent them. client_seconds: until it has taken what was sent.
    request_seconds: until an answer is complete. drain_seconds: for running requests when the server stops.
    retry_after_seconds: what a refused client is told to wait.

    Raises `InvalidArgument` for a value outside its limits.
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
