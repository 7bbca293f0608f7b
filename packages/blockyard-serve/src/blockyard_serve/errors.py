"""What a client is told when something is wrong, in OpenAI's form: a status and one object with four fields."""

from __future__ import annotations

from typing import Any

from blockyard.errors import BlockyardError, InvalidArgument, NeverFits

SERVER_FAILED = "the server failed on this request; its log says why"


class ApiError(BlockyardError):
    """An error for one client.

    status: of HTTP. kind: OpenAI's `type`. code: a word for programs, or None. param: the field at fault, or None.
    retry_after: seconds after which the client may try again, or None. close: whether the connection ends with it.
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

    def __reduce__(self) -> Any:  # a replica's error goes to its ingress
        return ApiError, (self.status, self.message), self.__dict__

    def body(self) -> dict[str, Any]:
        """Return the JSON object that the client gets."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that go with it."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the client can fix it."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str) -> ApiError:
    """Return a 400, under the code that OpenAI's clients know for a prompt beyond the context."""
    return invalid(message, param, "context_length_exceeded")


def overloaded(message: str, retry_after: int) -> ApiError:
    """Return a 429: the queue is full."""
    return ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded", retry_after=retry_after)


def unavailable(message: str, retry_after: int) -> ApiError:
    """Return a 503: the server is going down, or its engine is."""
    return ApiError(503, message, "server_error", code="unavailable", retry_after=retry_after)


def timed_out(message: str, status: int = 504) -> ApiError:
    """Return a 504: an answer that took longer than the limit; 408 for a client that did."""
    return ApiError(status, message, "timeout_error", code="timeout", close=status == 408)


def failed() -> ApiError:
    """Return a 500: the engine's fault. What went wrong is the operator's to read, not the client's."""
    return ApiError(500, SERVER_FAILED, "server_error", code="internal_error")


def as_api_error(error: BaseException) -> ApiError:
    """Return the form of an error of the engine in which a client may see it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, NeverFits):
        return too_long(str(error), "max_tokens")
    if isinstance(error, InvalidArgument):
        return invalid(str(error))
    return failed()
