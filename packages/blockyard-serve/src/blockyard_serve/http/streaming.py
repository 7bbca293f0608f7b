"""Streamed responses as server-sent events."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from blockyard_engine import NewToken

from ..errors import ApiError
from ..openai.responses import Choice, ResponseBuilder, token_counts
from .request_log import entry_of
from .request_run import ClientGone, Run, while_connected

_DONE = b"data: [DONE]\n\n"


class Pieces:
    """Turns the tokens of a run into the choices of a stream."""

    def __init__(self, form: ResponseBuilder, num_completions: int) -> None:
        self._form = form
        self._num_completions = num_completions
        self._has_begun: set[int] = set()

    def of(self, position: int, token: NewToken) -> list[Choice]:
        """Return the choices for a token of the prompt at `position`; none while its text is held back. O(its text)."""
        index, choices = self._index(position, token), []
        if token.text or token.logprob is not None:
            choices.append(self._form.text_choice(index, token.text, token.logprob))
        if token.finish_reason is not None:
            choices.append(self._form.end_choice(index, str(token.finish_reason)))
        return choices

    def opening(self, position: int, token: NewToken) -> list[Choice]:
        """Return the choice to send before a completion's first token; none for later tokens. O(1)."""
        index = self._index(position, token)
        if index in self._has_begun:
            return []
        self._has_begun.add(index)
        opening = self._form.opening(index)
        return [] if opening is None else [opening]

    def _index(self, position: int, token: NewToken) -> int:
        return position * self._num_completions + token.index


class EventStream(Response):
    """The stream of one run. Errors before the first chunk are normal error responses; later ones are sent as an event.

    Args:
        wants_usage: whether the last chunk has the token counts.
        wants_continuous_usage: whether every chunk has them.
    """

    def __init__(
        self, run: Run, form: ResponseBuilder, wants_usage: bool, wants_continuous_usage: bool = False
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]  # Response sets it for an empty body
        self._run = run
        self._form = form
        self._wants_usage = wants_usage
        self._wants_continuous_usage = wants_continuous_usage
        self._num_tokens = 0
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._run, contextlib.suppress(ClientGone):  # leaving the run frees its blocks
                await while_connected(self._send_all(scope, receive, send), receive)
        finally:
            entry_of(scope).note_results(self._run.finished.values())

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._pieces()) as pieces:
                async for piece in pieces:
                    await self._send(send, piece)
        except ApiError as error:
            if not self._has_begun:
                await JSONResponse(error.body(), error.status, error.headers())(scope, receive, send)
                return
            entry_of(scope).note_late_error(error.status)
            await self._send(send, _event(error.body()))
        await self._send(send, _DONE, more_body=False)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        pieces = Pieces(self._form, self._run.jobs[0].num_completions)
        async with contextlib.aclosing(self._run.events()) as lists:
            async for happened in lists:
                events: list[bytes] = []
                for position, event in happened:
                    if isinstance(event, NewToken):
                        events += self._encoded(pieces.opening(position, event))
                        self._num_tokens += 1
                        events += self._encoded(pieces.of(position, event))
                if events:
                    yield b"".join(events)
        if self._wants_usage:
            yield _event(self._form.usage_chunk(list(self._run.finished.values())))

    def _encoded(self, choices: list[Choice]) -> list[bytes]:
        more: dict[str, Any] = {"usage": None} if self._wants_usage else {}  # null in every chunk but the last
        if self._wants_continuous_usage:
            num_prompt = sum(len(job.prompt.token_ids) for job in self._run.jobs)
            more = {"usage": token_counts(num_prompt, self._num_tokens)}
        return [_event({**self._form.chunk(choice), **more}) for choice in choices]

    async def _send(self, send: Send, piece: bytes, more_body: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": piece, "more_body": more_body})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n\n"
