"""An id for every request, in its answer's headers and in the log, where a line says what became of it.

The paths find the entry of their request with `entry_of`, and tell it what only they know. Warnings that any client can
have written as often as it likes come once in ten seconds, with the number left out.
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

#: Seconds between two warnings of the same words.
REPEAT_SECONDS = 10.0
#: Different ones that are known at a time.
_MOST_WORDS = 64


class Sparingly(logging.Filter):
    """Lets a warning pass if its words did not in the last ten seconds; all else passes. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By words: when they passed, and how many have not since.
        self._passed: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether the record is written. O(1)."""
        if record.levelno != logging.WARNING:
            return True
        words, now = str(record.msg), self._clock()
        last, left_out = self._passed.get(words, (-REPEAT_SECONDS, 0))
        if now - last < REPEAT_SECONDS:
            self._passed[words] = last, left_out + 1
            return False
        if len(self._passed) >= _MOST_WORDS:
            self._passed.clear()
        self._passed[words] = now, 0
        if left_out:
            record.msg = f"{words} And {left_out} more since the last such line."
        return True


_ID_HEADER = b"x-request-id"
_USABLE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MAX_PATH = 200
_ENTRY = "log_entry"  # in the scope's "state"
_log = logging.getLogger(__name__)


class RequestLog:
    """ASGI around the application: it sees the answers to what the application does not catch, too.

    A client, or a proxy before the server, may send an id of its own in X-Request-ID. A line is INFO; it is WARNING
    for an answer with 500 or 504, so that it is there without an access log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on; O(headers)."""
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
    """One request: its id, and what its line will say."""

    def __init__(self, scope: Scope) -> None:
        self.request_id = _id_of(scope)
        self._scope = scope
        self._started_at = time.perf_counter()
        self._status = 0
        self._late_status = 0
        self._is_whole = False
        self._results: list[GenerationResult] = []

    def note_results(self, results: Iterable[GenerationResult]) -> None:
        """Note what came of its prompts, those that ran to their end."""
        self._results = list(results)

    def note_late_error(self, status: int) -> None:
        """Note an error that came when the answer had begun, so that its own status is not the answer's."""
        self._late_status = status

    @property
    def has_failed(self) -> bool:
        """Say whether it is the server's fault, or the time was over."""
        return bool({500, 504} & {self._status, self._late_status})

    def around(self, send: Send) -> Send:
        """Wrap `send`, with the id in the headers."""

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (_ID_HEADER, self.request_id.encode())]}
            elif message["type"] == "http.response.body":
                self._is_whole = not message.get("more_body", False)
            await send(message)

        return send_noted

    def __str__(self) -> str:
        # The path as it was sent, percent signs and all: decoded, it could forge a line. The query may hold secrets.
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
    """Return the entry of a request; where nothing keeps a log, one that nothing reads. O(1)."""
    entry = scope.get("state", {}).get(_ENTRY)
    return entry if isinstance(entry, LogEntry) else LogEntry(scope)


def _id_of(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name.lower() == _ID_HEADER and _USABLE_ID.fullmatch(value):
            return bytes(value).decode("ascii")
    return f"req-{secrets.token_hex(12)}"


def log_config(has_info: bool) -> dict[str, Any]:
    """For `logging.config.dictConfig`: the server's log and uvicorn's on stderr, with times. has_info: INFO too.

    The lines that say how it goes are INFO, and there in any case. Of uvicorn's warnings, which clients cause without a
    key, there are few.
    """
    logger = {"handlers": ["stderr"], "level": "INFO" if has_info else "WARNING", "propagate": False}
    stderr = {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}
    status = {**logger, "level": "INFO"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(message)s"}},
        "filters": {"sparingly": {"()": Sparingly}},
        "handlers": {"stderr": stderr, "few": {**stderr, "filters": ["sparingly"]}},
        "loggers": {
            "uvicorn": {**logger, "handlers": ["few"]},
            "blockyard_serve": logger,
            "blockyard_serve.status": status,
        },
    }
