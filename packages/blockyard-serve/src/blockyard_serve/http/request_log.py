"""Request ids, and a log line for each request.

Routes get the entry of their request with `entry_of` and add their own fields. Warnings that a client can
provoke are written once in ten seconds, with the number of suppressed ones.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockyard_engine import GenerationResult

from ..openai.responses import usage

#: Seconds between two equal warnings.
REPEAT_SECONDS = 10.0
#: Maximum of different warnings to remember.
_MAX_WARNINGS = 64


class RepeatFilter(logging.Filter):
    """Logging filter that suppresses a warning if the same one was written in the last ten seconds.

    Args:
        clock: returns seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By message: when it was last written, and how many were suppressed since.
        self._written: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write the record. O(1)."""
        if record.levelno != logging.WARNING:
            return True
        message, now = str(record.msg), self._clock()
        last, suppressed = self._written.get(message, (-REPEAT_SECONDS, 0))
        if now - last < REPEAT_SECONDS:
            self._written[message] = last, suppressed + 1
            return False
        if len(self._written) >= _MAX_WARNINGS:
            self._written.clear()
        self._written[message] = now, 0
        if suppressed:
            record.msg = f"{message} And {suppressed} more since the last such line."
        return True


_ID_HEADER = b"x-request-id"
_USABLE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MAX_PATH = 200
_ENTRY = "log_entry"  # in the scope's "state"
_log = logging.getLogger(__name__)


class RequestLog:
    """ASGI middleware that logs each request, also if the application raises.

    Clients and proxies may send an id in X-Request-ID. Lines are INFO, and WARNING for 500 and 504, which are thus
    logged even without an access log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = LogEntry(scope)
        scope.setdefault("state", {})[_ENTRY] = entry
        try:
            await self._app(scope, receive, entry.around(send))
        finally:
            _log.log(logging.WARNING if entry.has_failed else logging.INFO, "%s", entry)


class LogEntry:
    """The log entry of one request."""

    def __init__(self, scope: Scope) -> None:
        ids = (value for name, value in scope["headers"] if name.lower() == _ID_HEADER)
        usable = (bytes(value).decode("ascii") for value in ids if _USABLE_ID.fullmatch(value))
        self.request_id = next(usable, None) or f"req-{secrets.token_hex(12)}"
        self._scope = scope
        self._started_at = time.perf_counter()
        self._status = 0
        self._late_status = 0
        self._is_whole = False
        self._results: list[GenerationResult] = []

    def note_results(self, results: Iterable[GenerationResult]) -> None:
        """Add the results of the prompts that finished."""
        self._results = list(results)

    def note_late_error(self, status: int) -> None:
        """Add an error that occurred after the response had begun with another status."""
        self._late_status = status

    @property
    def has_failed(self) -> bool:
        """True if the server failed or the deadline passed."""
        return bool({500, 504} & {self._status, self._late_status})

    def around(self, send: Send) -> Send:
        """Wrap `send`: add the id to the headers, and record the status."""

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_ID_HEADER, self.request_id.encode())]}
            elif message["type"] == "http.response.body":
                self._is_whole = not message.get("more_body", False)
            await send(message)

        return send_noted

    def __str__(self) -> str:
        # The path is not decoded, because it could then forge a line. The query is left out: it may hold secrets.
        path = bytes(self._scope.get("raw_path") or b"")[:_MAX_PATH].decode("ascii", "replace")
        client = ":".join(str(part) for part in self._scope.get("client") or ("-",))
        end = f" then {self._late_status}" * (self._late_status > 0) + " cut" * (not self._is_whole)
        seconds = time.perf_counter() - self._started_at
        head = f'{client} "{self._scope["method"][:20]} {path}" {self._status}{end} {seconds:.3f} s'
        return f"{head}{self._tokens()} {self.request_id}"

    def _tokens(self) -> str:
        if not self._results:
            return ""
        used: dict[str, Any] = usage(self._results)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        return f" prompt={used['prompt_tokens']} cached={cached} new={used['completion_tokens']}"


def entry_of(scope: Scope) -> LogEntry:
    """Return the log entry of a request; an unused one if the application has no `RequestLog`. O(1)."""
    entry = scope.get("state", {}).get(_ENTRY)
    return entry if isinstance(entry, LogEntry) else LogEntry(scope)


def log_config(has_info: bool) -> dict[str, Any]:
    """Return a configuration for `logging.config.dictConfig`: the server's and uvicorn's logs on stderr, with times.

    Status lines are always written. Repeated warnings of uvicorn, which clients can provoke without a key, are
    suppressed.

    Args:
        has_info: whether to write INFO lines.
    """
    logger = {"handlers": ["stderr"], "level": "INFO" if has_info else "WARNING", "propagate": False}
    stderr = {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}
    status = {**logger, "level": "INFO"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "filters": {"sparingly": {"()": RepeatFilter}},
        "handlers": {"stderr": stderr, "few": {**stderr, "filters": ["sparingly"]}},
        "loggers": {
            "uvicorn": {**logger, "handlers": ["few"]},
            "blockyard_serve": logger,
            "blockyard_serve.status": status,
        },
    }
