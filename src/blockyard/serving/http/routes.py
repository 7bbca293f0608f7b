"""The paths: what clients of OpenAI and vLLM call, and what operators ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ... import __version__
from ..jobs.metrics_page import MetricsPage
from ..openai.protocol import ChatRequest, CompletionRequest
from ..openai.responses import ChatForm, CompletionForm
from .api_key import KeyGuard
from .service import Service

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Load balancers and browsers ask with HEAD; the answer has GET's headers and no body.
_READING = ["GET", "HEAD"]


def openai_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """What clients of OpenAI call, behind the key."""
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
        """POST /v1/completions."""
        return await service.answer(request, CompletionRequest, CompletionForm)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await service.answer(request, ChatRequest, ChatForm)

    return router


def operator_routes(service: Service, page: MetricsPage, has_ui: bool) -> APIRouter:
    """Health, metrics, version and what is where: without the key, because probes and scrapers have none."""
    router = APIRouter()

    async def root() -> Response:
        """GET /: where the rest is, for who opens the address in a browser."""
        lines = [
            "This is a server of blockyard.",
            "OpenAI's API is under /v1/ (docs/serving.md has its paths and fields).",
        ]
        lines += ["A page that shows the blocks is at /ui/."] * has_ui
        return PlainTextResponse("\n".join([*lines, "Probes ask /health, Prometheus asks /metrics.", ""]))

    async def health() -> Response:
        """GET /health: 200, or 503 and why no request is taken. All ranks of the engine are asked."""
        refusal = await asyncio.to_thread(service.thread.ask_ranks)
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
