"""These are the paths that clients of OpenAI and vLLM call, and those that operators ask for.

A path of OpenAI's or vLLM's APIs that this server does not have is answered with the reason: a bare 404 would not say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from blockyard import __version__
from blockyard.errors import InvariantError, OverBudget
from blockyard.keys import CacheSalt
from blockyard_engine import Engine

from ..errors import ApiError, invalid
from ..jobs.engine_thread import EngineThread
from ..jobs.metrics_page import Page
from ..jobs.planner import session_name
from ..jobs.prompts import PromptEncoder
from ..jobs.request_figures import RequestFigures
from ..openai.hints import Hint, RetainChat, RetainText, parse_hints, parse_retain
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.responses import ChatForm, CompletionForm
from ..openai.tokenizing import TokenizeFields, parse_detokenize, parse_tokenize, text_of, tokenize_answer
from .access import KeyGuard, tenant_of
from .run import Deadline
from .service import Service, within

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Load balancers and browsers ask with HEAD; the answer has GET's headers and no body.
_READING = ["GET", "HEAD"]


def openai_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """Make the paths that clients of OpenAI call, behind the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.api_route("/models", methods=_READING)
    async def models() -> dict[str, Any]:
        """GET /v1/models: the one model, as a list."""
        return {"object": "list", "data": [service.model()]}

    @router.api_route("/models/{name:path}", methods=_READING)
    async def model(name: str) -> dict[str, Any]:
        """GET /v1/models/{name}: the one model, or 404."""
        service.require_model(name)
        return service.model()

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Answer POST /v1/completions."""
        return await service.answer(request, CompletionRequest, CompletionForm)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer POST /v1/chat/completions."""
        return await service.answer(request, ChatRequest, ChatForm)

    return router


def operator_routes(service: Service, page: Page, has_ui: bool) -> APIRouter:
    """Make the paths of health, metrics and version, without the key: probes and scrapers have none."""
    router = APIRouter()

    async def root() -> Response:
        """GET /: where the rest is, for who opens the address in a browser."""
        lines = [
            "This is a server of blockyard.",
            "OpenAI's API is under /v1/ (docs/serving.md has its paths and fields).",
        ]
        lines += ["A page that shows what happens is at /ui/."] * has_ui
        return PlainTextResponse("\n".join([*lines, "Probes ask /health, Prometheus asks /metrics.", ""]))

    async def health() -> Response:
        """GET /health: 200, or 503 and why no request is taken. All ranks of the engine are asked."""
        refusal = await asyncio.to_thread(service.runner.ask_ranks)
        return JSONResponse({"status": refusal or "ok"}, 503 if refusal else 200)

    async def metrics() -> Response:
        """GET /metrics: Prometheus's text."""
        return Response(await page.text(), headers={"Content-Type": _METRICS_TYPE})

    async def version() -> Response:
        """GET /version."""
        return JSONResponse({"version": __version__})

    paths: list[tuple[str, Callable[..., Any], list[str]]] = [
        ("/", root, _READING),
        ("/health", health, _READING),
        ("/ping", health, [*_READING, "POST"]),  # what SageMaker asks; vLLM answers it too
        ("/metrics", metrics, _READING),
        ("/version", version, _READING),
    ]
    for path, answer, methods in paths:
        router.add_api_route(path, answer, methods=methods, response_model=None)
    return router


def check_routes(thread: EngineThread, guard: KeyGuard) -> APIRouter:
    """GET /check, behind the server's own key."""
    router = APIRouter(dependencies=[Depends(guard.own)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        """GET /check: verify the cache between two steps."""
        answer = await asyncio.wrap_future(thread.ask(_check))
        return JSONResponse(answer, 200 if answer["ok"] else 500)

    return router


def _check(engine: Engine) -> dict[str, Any]:
    try:
        engine.cache.check()
    except InvariantError as error:
        return {"ok": False, "error": str(error)}
    stats = engine.cache.stats()
    return {
        "ok": True,
        "num_used_blocks": stats.num_used_blocks,
        "num_free_blocks": stats.num_free_blocks,
        "num_running_seqs": stats.num_running_seqs,
        "has_unfinished": engine.has_unfinished,
        "holders": [holding.holder for holding in engine.cache.leak_report()][:100],
    }


class EngineAsker(Protocol):
    """Asks the engine, or those of a fleet, between two steps. What is asked is carried to other processes."""

    async def hint(self, said: list[Hint]) -> list[str]:
        """Return what came of each hint."""

    async def retain(self, wish: Wish) -> tuple[int, int]:
        """Return how many blocks were retained before, and are. Raises `ApiError`."""


@dataclass(frozen=True, slots=True)
class Wish:
    """This is a prompt to be retained, encoded."""

    token_ids: Sequence[int]
    keys: tuple[CacheSalt, ...]
    priority: int
    seconds: float | None


class OneEngine:
    """Asks the engine of a thread (an `EngineAsker`)."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def hint(self, said: list[Hint]) -> list[str]:
        """Give the hints to the engine."""
        return await asyncio.wrap_future(self._thread.ask(partial(tell, said)))

    async def retain(self, wish: Wish) -> tuple[int, int]:
        """Give the wish to the engine."""
        return await asyncio.wrap_future(self._thread.ask(partial(retain, wish)))


def tell(said: list[Hint], engine: Engine) -> list[str]:
    """Give hints to an engine; return what came of each."""
    return [_told(engine, hint) for hint in said]


def retain(wish: Wish, engine: Engine) -> tuple[int, int]:
    """Have an engine retain a prompt; return how many blocks it did before, and does. Raises `ApiError`."""
    if not engine.cache.config.hints.retention_blocks:
        raise invalid("this server retains nothing; start it with --retention-blocks")
    try:
        kept = engine.num_retained_of(wish.token_ids, extra_keys=wish.keys)
        return kept, engine.retain(wish.token_ids, priority=wish.priority, seconds=wish.seconds, extra_keys=wish.keys)
    except OverBudget as error:
        raise ApiError(409, str(error), code="over_budget") from None


def hint_routes(service: Service, asker: EngineAsker, figures: RequestFigures, guard: KeyGuard) -> APIRouter:
    """Return the path, behind the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.post("/hints", response_model=None)
    async def hints(request: Request) -> Response:
        """Answer POST /v1/hints: what came of each hint, in order."""
        service.runner.require_place(0)
        deadline = Deadline(service.limits.request_seconds)
        said = await service.read(request, parse_hints)
        said = [
            hint.model_copy(update={"cache_salt": service.planner.salt_of(tenant_of(request), hint.cache_salt)})
            for hint in said
        ]
        outcomes = await within(deadline, request, asker.hint(said))
        for outcome in outcomes:
            figures.count_hint(outcome)
        answers = [hint.answer(outcome) for hint, outcome in zip(said, outcomes, strict=True)]
        return JSONResponse({"object": "list", "data": answers})

    return router


def _told(engine: Engine, hint: Hint) -> str:
    name = session_name(hint.session_id, hint.cache_salt)
    return engine.hint(name, over=hint.action == "over").value


_WHY = {
    "/docs": "docs/serving.md describes its paths and fields",
    "/v1/embeddings": "its model generates text, and no embeddings",
    "/v1/responses": "it has the chat and completion paths alone",
    "/v1/audio": "it reads and writes text alone",
    "/v1/images": "it reads and writes text alone",
    "/v1/moderations": "it judges no text",
    "/v1/rerank": "it judges no text",
    "/v1/score": "it judges no text",
    "/v1/files": "it keeps nothing for clients",
    "/v1/batches": "it keeps nothing for clients",
    "/v1/fine_tuning": "it trains nothing",
    "/v1/load_lora_adapter": "it has one model and loads no LoRA adapters",
    "/v1/unload_lora_adapter": "it has one model and loads no LoRA adapters",
}
_OUTSIDE = "OpenAI's paths begin with /v1/ here"


def why_absent(path: str) -> str | None:
    """Return the rest of the sentence for a path that leads nowhere, None for one that means nothing to any server."""
    for known, why in _WHY.items():
        if path == known or path.startswith(f"{known}/"):
            return f"this server does not have it: {why}"
    return None if path.startswith("/v1/") else _OUTSIDE


def retain_routes(service: Service, asker: EngineAsker, encoder: PromptEncoder, guard: KeyGuard) -> APIRouter:
    """Return the path, behind the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.post("/retain", response_model=None)
    async def retained(request: Request) -> Response:
        """Answer POST /v1/retain: how many blocks are retained, how many of them were before, of how many tokens."""
        service.runner.require_place(0)
        deadline = Deadline(service.limits.request_seconds)
        wanted = await service.read(request, parse_retain)
        service.require_model(wanted.model)
        salt = service.planner.salt_of(tenant_of(request), wanted.cache_salt)
        return JSONResponse(await within(deadline, request, _retained(asker, encoder, wanted, salt)))

    return router


async def _retained(
    asker: EngineAsker, encoder: PromptEncoder, wanted: RetainText | RetainChat, salt: str | None
) -> dict[str, int | str]:
    prompt = await encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
    keys = () if salt is None else (CacheSalt(salt),)
    kept, num_blocks = await asker.retain(Wish(prompt.token_ids, keys, wanted.priority, wanted.seconds))
    return {
        "object": "retention",
        "num_blocks": num_blocks,
        "num_kept": kept,
        "num_tokens": len(prompt.token_ids),
    }


class TokenizerPaths:
    """What both paths do. block_size: tokens of a block that can be hit."""

    def __init__(self, service: Service, encoder: PromptEncoder, block_size: int) -> None:
        self._service = service
        self._encoder = encoder
        self._block_size = block_size

    async def tokenize(self, request: Request) -> Response:
        """Turn a text or messages into tokens. Raises `ApiError`."""
        deadline = self._begin()
        wanted = await self._service.read(request, parse_tokenize)
        self._service.require_model(wanted.model)
        return Response(await within(deadline, request, self._encoded(wanted)), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Turn tokens into a text. Raises `ApiError`."""
        deadline = self._begin()
        wanted = await self._service.read(request, parse_detokenize)
        self._service.require_model(wanted.model)
        return JSONResponse({"prompt": await within(deadline, request, self._decoded(wanted.tokens))})

    def _begin(self) -> Deadline:
        self._service.runner.require_place(0)
        return Deadline(self._service.limits.request_seconds)

    async def _encoded(self, wanted: TokenizeFields) -> bytes:
        prompt = await self._encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
        max_model_len = self._service.planner.max_model_len

        def answer(tokenizer: Any) -> bytes:
            found = tokenize_answer(wanted, prompt.token_ids, tokenizer, max_model_len, self._block_size)
            return json.dumps(found, separators=(",", ":")).encode("ascii")

        # As JSON in the encoder's thread too: a megabyte of text is many megabytes of tokens.
        return await self._encoder.ask(answer, len(prompt.token_ids))

    async def _decoded(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        prompt = await self._encoder.encode("tokens", token_ids)
        return await self._encoder.ask(lambda tokenizer: text_of(tokenizer, prompt.token_ids), len(token_ids))


def tokenizer_routes(service: Service, encoder: PromptEncoder, block_size: int, guard: KeyGuard) -> APIRouter:
    """Return both paths, behind the key."""
    router = APIRouter(dependencies=[Depends(guard)])
    paths = TokenizerPaths(service, encoder, block_size)
    router.add_api_route("/tokenize", paths.tokenize, methods=["POST"], response_model=None)
    router.add_api_route("/detokenize", paths.detokenize, methods=["POST"], response_model=None)
    return router
