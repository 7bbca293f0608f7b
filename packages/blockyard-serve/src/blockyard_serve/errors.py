"""Errors sent to clients: an HTTP status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

from blockyard.errors import BlockyardError, InvalidArgument, NeverFits

SERVER_FAILED = "the server failed on this request; its log says why"


class ApiError(BlockyardError):
    """An error response.

    Args:
        status: HTTP status.
        message: text for the client.
        kind: OpenAI's `type`.
        code: machine-readable code, if any.
        param: request field that caused the error, if any.
        retry_after: seconds after which the client may retry, if any.
        close: whether to close the connection after the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self.close = close

    def __reduce__(self) -> Any:  # a replica sends its errors to an ingress
        return ApiError, (self.status, self.message), self.__dict__

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error: the client has to change its request."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str) -> ApiError:
    """Return a 400 error with OpenAI's code for a prompt that exceeds the context."""
    return invalid(message, param, "context_length_exceeded")


def overloaded(message: str, retry_after: int) -> ApiError:
    """Return a 429 error: the queue is full."""
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after)


def unavailable(message: str, retry_after: int) -> ApiError:
    """Return a 503 error: the server is stopping or its engine has failed."""
    return ApiError(503, message, "server_error", code="unavailable", retry_after=retry_after)


def timed_out(message: str, status: int = 504) -> ApiError:
    """Return a timeout error: 504 if the response took too long, 408 if the client did."""
    return ApiError(status, message, "timeout_error", code="timeout", close=status == 408)


def failed() -> ApiError:
    """Return a 500 error. The details are in the log, not in the response."""
    return ApiError(500, SERVER_FAILED, "server_error", code="internal_error")


def as_api_error(error: BaseException) -> ApiError:
    """Return the error that a client may see for an exception of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NeverFits):
        return too_long(str(error), "max_tokens")
    if isinstance(error, InvalidArgument):
        return invalid(str(error))
    return failed()
