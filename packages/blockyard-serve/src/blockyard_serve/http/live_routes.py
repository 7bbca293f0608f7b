"""Routes of the page under /ui. Its state needs the key; its files do not, because browsers load them without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from blockyard import KVCacheManager
from blockyard.errors import InvalidArgument
from blockyard_engine import Engine, GenerationResult

from ..jobs.engine_thread import EngineThread
from ..jobs.job import Job
from ..jobs.prompt_encoder import PromptEncoder
from ..live import EngineStatus, LivePage
from ..live.prompt_log import PromptLog
from .access import KeyGuard

#: The page with prompts, without prompts, or no page.
UI_MODES = ("text", "map", "off")


def require_ui_mode(mode: str) -> str:
    """Return `mode` if it is one of `UI_MODES`; otherwise raise `InvalidArgument`."""
    if mode not in UI_MODES:
        raise InvalidArgument(f"ui is {mode!r}; it must be one of {', '.join(UI_MODES)}")
    return mode


def add_live_page(
    app: FastAPI, thread: EngineThread, encoder: PromptEncoder, model_name: str, guard: KeyGuard, mode: str
) -> None:
    """Mount the page at /ui/, and redirect /ui to it. `mode` is one of `UI_MODES`; "off" does nothing."""
    if require_ui_mode(mode) == "off":
        return
    shows_text = mode == "text"

    async def texts(lists: Sequence[Sequence[int]]) -> list[str]:
        def decode(tokenizer: Any) -> list[str]:
            return [tokenizer.decode(list(tokens), skip_special_tokens=False) for tokens in lists]

        return await encoder.call(decode)

    page = LivePage(
        EngineSource(thread, shows_text),
        model_name,
        texts,
        shows_text,
        "../v1/chat/completions",
        lambda scope: guard.require_server_key(Request(scope)),
        lambda: thread.refusal is not None,
    )
    if shows_text:
        log_prompts(thread, page.prompts)

    mount_page(app, page)
    app.state.live_page = page


def mount_page(app: FastAPI, page: ASGIApp) -> None:
    """Mount a page at /ui/, and redirect /ui to it."""

    async def to_the_page(request: Request) -> Response:  # noqa: ARG001
        return RedirectResponse("ui/", 307)  # relative, for proxies that add a prefix

    app.add_route("/ui", to_the_page, methods=["GET", "HEAD"])
    app.mount("/ui", page)


AnswerT = TypeVar("AnswerT")


class EngineSource:
    """The cache of an engine thread, as a `CacheSource` of the page.

    Args:
        shows_names: whether to show the X-Request-ID of clients.
    """

    def __init__(self, thread: EngineThread, shows_names: bool = True) -> None:
        self._thread = thread
        self._shows_names = shows_names

    def call(self, function: Callable[[KVCacheManager, EngineStatus], AnswerT]) -> Future[AnswerT]:
        """See `CacheSource.call`. The future raises `ApiError` if the thread has ended."""
        return self._thread.call(lambda engine: function(engine.cache, self._status(engine)))

    def _status(self, engine: Engine) -> EngineStatus:
        names = self._names() if self._shows_names else {}
        step, preemptions = self._thread.num_steps, engine.num_preemptions
        counts = (step, engine.num_running, engine.num_waiting, preemptions)
        return EngineStatus(*counts, names, engine.loading_blocks, _tier_lines(engine))

    def _names(self) -> dict[str, str]:
        """Return display names by holder, as the engine's scheduler names holders. O(completions)."""
        names = {}
        for request_id, (name, num_completions) in self._thread.job_names().items():
            names[f"request {request_id}"] = name
            for index in range(1, num_completions):
                names[f"request {request_id}, completion {index}"] = f"{name}, completion {index}"
        return names


def log_prompts(thread: EngineThread, prompts: PromptLog) -> None:
    """Add the prompt of each job that finishes from now on to `prompts`."""

    def note(job: Job, result: GenerationResult) -> None:
        prompts.note(job.prompt.token_ids, result.num_cached_tokens, job.extra_keys, job.name)

    thread.on_result = note


def _tier_lines(engine: Engine) -> tuple[str, ...]:
    """Return a line per tier: prompt tokens loaded, objects held, and its health. O(tiers)."""
    if engine.offload is None:
        return ()
    lines = []
    for tier in engine.offload.read().tiers:
        stats = tier.stats
        failing = ["loads"] * stats.is_load_failing + ["stores"] * stats.is_store_failing
        state = f"{' and '.join(failing)} failing" if failing else "healthy"
        lines.append(
            f"{tier.name}: {tier.num_hit_tokens:,} prompt tokens loaded; {stats.num_objects:,} objects, "
            f"{stats.object_bytes / 2**20:,.0f} MiB; {state}"
        )
    return tuple(lines)
