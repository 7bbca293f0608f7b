"""The page under /ui: its state behind the key, its files open, because a browser asks for those without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ...errors import InvalidArgument
from ...live import LivePage
from ..jobs.engine_thread import EngineThread
from ..jobs.live_source import EngineSource, note_prompts
from ..jobs.prompts import PromptEncoder
from .api_key import KeyGuard

#: What the page shows: prompts too, the map and the figures alone, or nothing at all.
UI_MODES = ("text", "map", "off")


def require_ui_mode(mode: str) -> str:
    """Return `mode` if it is one of `UI_MODES`. Raises `InvalidArgument`."""
    if mode not in UI_MODES:
        raise InvalidArgument(f"ui is {mode!r}; it must be one of {', '.join(UI_MODES)}")
    return mode


def add_live_page(
    app: FastAPI, thread: EngineThread, encoder: PromptEncoder, model_name: str, guard: KeyGuard, mode: str
) -> None:
    """Mount the page at /ui/, and lead /ui there. mode: of `UI_MODES`; nothing is mounted, or noted, for "off"."""
    if require_ui_mode(mode) == "off":
        return
    shows_text = mode == "text"

    async def texts(lists: Sequence[Sequence[int]]) -> list[str]:
        def decode(tokenizer: Any) -> list[str]:
            return [tokenizer.decode(list(tokens), skip_special_tokens=False) for tokens in lists]

        return await encoder.ask(decode)

    page = LivePage(
        EngineSource(thread, shows_text),
        model_name,
        texts,
        shows_text,
        "../v1/chat/completions",
        lambda scope: guard(Request(scope)),
        lambda: thread.refusal is not None,
    )
    if shows_text:
        note_prompts(thread, page.prompts)

    async def to_the_page(request: Request) -> Response:  # noqa: ARG001
        return RedirectResponse("ui/", 307)  # relative, so that it holds behind a proxy with a prefix

    app.add_route("/ui", to_the_page, methods=["GET", "HEAD"])
    app.mount("/ui", page)
    app.state.live_page = page
