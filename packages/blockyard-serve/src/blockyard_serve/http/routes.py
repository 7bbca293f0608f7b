"""Routes of OpenAI's and vLLM's APIs, probes, metrics, and Blockyard's own.

For a known path of OpenAI's or vLLM's API that this server lacks, the 404 says why.
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
from ..jobs.prompt_encoder import PromptEncoder
from ..jobs.request_metrics import RequestMetrics
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.responses import ChatBuilder, CompletionBuilder
from ..openai.session_hints import Hint, RetainChat, RetainText, parse_hints, parse_retain
from ..openai.tokenizing import TokenizeFields, parse_detokenize, parse_tokenize, text_of, tokenize_answer
from .access import KeyGuard, tenant_of
from .request_run import Deadline
from .service import Service, within

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Load balancers and browsers send HEAD; the response has GET's headers and no body.
_READING = ["GET", "HEAD"]


def openai_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """Return the routes of OpenAI's API, which need the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.api_route("/models", methods=_READING)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @router.api_route("/models/{name:path}", methods=_READING)
    async def model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return service.model()

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionRequest, CompletionBuilder)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, ChatRequest, ChatBuilder)

    return router


def operator_routes(service: Service, page: Page, has_ui: bool) -> APIRouter:
    """Return the routes of health, metrics and version, without a key: probes and scrapers have none."""
    router = APIRouter()

    async def root() -> Response:
        lines = [
            "This is a Blockyard server.",
            "OpenAI's API is under /v1/ (see docs/serving.md for paths and fields).",
        ]
        lines += ["A page that shows its blocks is at /ui/."] * has_ui
        return PlainTextResponse("\n".join([*lines, "Probes use /health, Prometheus uses /metrics.", ""]))

    async def health() -> Response:
        """Answer 200, or 503 with the reason. Checks every rank of the engine."""
        refusal = await asyncio.to_thread(service.runner.check_ranks)
        return JSONResponse({"status": refusal or "ok"}, 503 if refusal else 200)

    async def metrics() -> Response:
        return Response(await page.text(), headers={"Content-Type": _METRICS_TYPE})

    async def version() -> Response:
        return JSONResponse({"version": __version__})

    paths: list[tuple[str, Callable[..., Any], list[str]]] = [
        ("/", root, _READING),
        ("/health", health, _READING),
        ("/ping", health, [*_READING, "POST"]),  # SageMaker's probe; vLLM has it too
        ("/metrics", metrics, _READING),
        ("/version", version, _READING),
    ]
    for path, answer, methods in paths:
        router.add_api_route(path, answer, methods=methods, response_model=None)
    return router


def check_routes(thread: EngineThread, guard: KeyGuard) -> APIRouter:
    """Return GET /check, which verifies the cache between two steps; needs the server's own key."""
    router = APIRouter(dependencies=[Depends(guard.require_server_key)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        answer = await asyncio.wrap_future(thread.call(_check))
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


class EngineClient(Protocol):
    """Calls the engine, or every engine of a fleet, between two steps."""

    async def hint(self, hints: list[Hint]) -> list[str]:
        """Apply hints; return the outcome of each."""

    async def retain_prompt(self, request: RetainRequest) -> tuple[int, int]:
        """Retain a prompt; return how many of its blocks were retained before and are now. Raises `ApiError`."""


@dataclass(frozen=True, slots=True)
class RetainRequest:
    """An encoded prompt to retain."""

    token_ids: Sequence[int]
    keys: tuple[CacheSalt, ...]
    priority: int
    seconds: float | None


class SingleEngine:
    """The `EngineClient` of a single engine thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread

    async def hint(self, hints: list[Hint]) -> list[str]:
        return await asyncio.wrap_future(self._thread.call(partial(apply_hints, hints)))

    async def retain_prompt(self, request: RetainRequest) -> tuple[int, int]:
        return await asyncio.wrap_future(self._thread.call(partial(retain_prompt, request)))


def apply_hints(hints: list[Hint], engine: Engine) -> list[str]:
    """Apply hints to an engine; return the outcome of each."""
    names = [session_name(hint.session_id, hint.cache_salt) for hint in hints]
    return [engine.hint(name, over=hint.action == "over").value for name, hint in zip(names, hints, strict=True)]


def retain_prompt(request: RetainRequest, engine: Engine) -> tuple[int, int]:
    """Retain a prompt in an engine; return how many of its blocks were retained before and are now."""
    if not engine.cache.config.hints.retention_blocks:
        raise invalid("this server does not retain prompts; start it with --retention-blocks")
    try:
        num_before = engine.num_retained_of(request.token_ids, extra_keys=request.keys)
        num_now = engine.retain(
            request.token_ids, priority=request.priority, seconds=request.seconds, extra_keys=request.keys
        )
        return num_before, num_now
    except OverBudget as error:
        raise ApiError(409, str(error), code="over_budget") from None


def hint_routes(service: Service, client: EngineClient, metrics: RequestMetrics, guard: KeyGuard) -> APIRouter:
    """Return POST /v1/hints, which needs the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.post("/hints", response_model=None)
    async def hints(request: Request) -> Response:
        service.runner.require_capacity(0)
        deadline = Deadline(service.limits.request_seconds)
        parsed = await service.read(request, parse_hints)
        salted = [
            hint.model_copy(update={"cache_salt": service.planner.salt_of(tenant_of(request), hint.cache_salt)})
            for hint in parsed
        ]
        outcomes = await within(deadline, request, client.hint(salted))
        for outcome in outcomes:
            metrics.count_hint(outcome)
        answers = [hint.answer(outcome) for hint, outcome in zip(salted, outcomes, strict=True)]
        return JSONResponse({"object": "list", "data": answers})

    return router


_WHY = {
    "/docs": "docs/serving.md describes its paths and fields",
    "/v1/embeddings": "its model generates text, not embeddings",
    "/v1/responses": "it only has chat and completion paths",
    "/v1/audio": "it only reads and writes text",
    "/v1/images": "it only reads and writes text",
    "/v1/moderations": "it does not score text",
    "/v1/rerank": "it does not score text",
    "/v1/score": "it does not score text",
    "/v1/files": "it stores no data for clients",
    "/v1/batches": "it stores no data for clients",
    "/v1/fine_tuning": "it does not train models",
    "/v1/load_lora_adapter": "it serves one model and loads no LoRA adapters",
    "/v1/unload_lora_adapter": "it serves one model and loads no LoRA adapters",
}
_OUTSIDE = "OpenAI's paths begin with /v1/ here"


def absence_reason(path: str) -> str | None:
    """Return why this server lacks a path, for the 404; None for paths below /v1/ that no API has."""
    for known, why in _WHY.items():
        if path == known or path.startswith(f"{known}/"):
            return f"this server does not have it: {why}"
    return None if path.startswith("/v1/") else _OUTSIDE


def retain_routes(service: Service, client: EngineClient, encoder: PromptEncoder, guard: KeyGuard) -> APIRouter:
    """Return POST /v1/retain, which needs the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.post("/retain", response_model=None)
    async def retained(request: Request) -> Response:
        service.runner.require_capacity(0)
        deadline = Deadline(service.limits.request_seconds)
        wanted = await service.read(request, parse_retain)
        service.require_model(wanted.model)
        salt = service.planner.salt_of(tenant_of(request), wanted.cache_salt)
        return JSONResponse(await within(deadline, request, _retained(client, encoder, wanted, salt)))

    return router


async def _retained(
    client: EngineClient, encoder: PromptEncoder, wanted: RetainText | RetainChat, salt: str | None
) -> dict[str, int | str]:
    prompt = await encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
    keys = () if salt is None else (CacheSalt(salt),)
    request = RetainRequest(prompt.token_ids, keys, wanted.priority, wanted.seconds)
    num_before, num_blocks = await client.retain_prompt(request)
    return {
        "object": "retention",
        "num_blocks": num_blocks,
        "num_kept": num_before,
        "num_tokens": len(prompt.token_ids),
    }


class TokenizerPaths:
    """Handlers of /tokenize and /detokenize.

    Args:
        block_size: tokens of a block that can be hit.
    """

    def __init__(self, service: Service, encoder: PromptEncoder, block_size: int) -> None:
        self._service = service
        self._encoder = encoder
        self._block_size = block_size

    async def tokenize(self, request: Request) -> Response:
        """Answer POST /tokenize. Raises `ApiError`."""
        deadline = self._begin()
        wanted = await self._service.read(request, parse_tokenize)
        self._service.require_model(wanted.model)
        return Response(await within(deadline, request, self._encoded(wanted)), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Answer POST /detokenize. Raises `ApiError`."""
        deadline = self._begin()
        wanted = await self._service.read(request, parse_detokenize)
        self._service.require_model(wanted.model)
        if not wanted.tokens:
            return JSONResponse({"prompt": ""})

        async def decode() -> str:
            prompt = await self._encoder.encode("tokens", wanted.tokens)
            return await self._encoder.call(lambda tokenizer: text_of(tokenizer, prompt.token_ids), len(wanted.tokens))

        return JSONResponse({"prompt": await within(deadline, request, decode())})

    def _begin(self) -> Deadline:
        self._service.runner.require_capacity(0)
        return Deadline(self._service.limits.request_seconds)

    async def _encoded(self, wanted: TokenizeFields) -> bytes:
        prompt = await self._encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
        max_model_len = self._service.planner.max_model_len

        def answer(tokenizer: Any) -> bytes:
            found = tokenize_answer(wanted, prompt.token_ids, tokenizer, max_model_len, self._block_size)
            return json.dumps(found, separators=(",", ":")).encode("ascii")

        # The JSON is made in the encoder's thread too: a megabyte of text is many megabytes of tokens.
        return await self._encoder.call(answer, len(prompt.token_ids))


def tokenizer_routes(service: Service, encoder: PromptEncoder, block_size: int, guard: KeyGuard) -> APIRouter:
    """Return POST /tokenize and POST /detokenize, which need the key."""
    router = APIRouter(dependencies=[Depends(guard)])
    paths = TokenizerPaths(service, encoder, block_size)
    router.add_api_route("/tokenize", paths.tokenize, methods=["POST"], response_model=None)
    router.add_api_route("/detokenize", paths.detokenize, methods=["POST"], response_model=None)
    return router
