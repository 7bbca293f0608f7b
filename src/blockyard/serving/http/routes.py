"""The paths under /v1, and beside it what operators ask for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine import Engine
from ...errors import InvariantError
from ..errors import ApiError
from ..jobs.engine_thread import EngineThread
from ..jobs.metrics import MetricsPage
from ..jobs.planner import Planner
from ..limits import ServerLimits
from ..openai.logprobs import TokenTexts
from ..openai.protocol import ChatRequest, CompletionRequest, GenerationFields, parse_request
from ..openai.responses import ChatForm, CompletionForm, Form
from .api_key import KeyGuard
from .body import read_body
from .deadline import Deadline
from .request_log import ID, RESULTS
from .run import ClientGone, Run, while_connected
from .streaming import EventStream

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Service:
    """What the paths need. model_name: what clients call the model."""

    thread: EngineThread
    planner: Planner
    texts: TokenTexts
    limits: ServerLimits
    model_name: str
    created: int

    async def answer(self, request: Request, kind: type[GenerationFields], form: type[Form]) -> Response:
        """Read a request, run it, and answer whole or in pieces. Raises `ApiError`."""
        deadline = Deadline(self.limits.request_seconds)
        state = request.scope.get("state", {})
        self.thread.require_place()
        body = await read_body(request, self.limits)
        wanted = await asyncio.to_thread(parse_request, kind, body)  # a large one takes long; others go on
        self.require_model(wanted.model)
        shape = form(self.model_name, self.texts, wanted.num_logprobs is not None)
        try:
            async with deadline.hold():
                planned = self.planner.jobs(wanted, deadline.arrived_at, state.get(ID, "without an id"))
                jobs = await while_connected(planned, request.receive)
            run = Run(self.thread, jobs, deadline, state.get(RESULTS, {}))
            if wanted.stream:
                return EventStream(run, shape, wanted.wants_usage)
            with run:
                return JSONResponse(shape.response(await run.results_for(request)))
        except ClientGone:
            return Response(status_code=499)  # nobody reads it

    def require_model(self, name: str) -> None:
        """Raise `ApiError` (404) for a model that is not this one."""
        if name != self.model_name:
            message = f"the model '{name[:100]}' does not exist; this server has '{self.model_name}'"
            raise ApiError(404, message, code="model_not_found", param="model")

    def model(self) -> dict[str, Any]:
        """The model as /v1/models shows it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockyard",
            "max_model_len": self.planner.max_model_len,
        }


def openai_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """What clients of OpenAI call, behind the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return service.model()

    @router.post("/completions", response_model=None)
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionRequest, CompletionForm)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, ChatRequest, ChatForm)

    return router


def operator_routes(service: Service, page: MetricsPage) -> APIRouter:
    """Health and metrics: without the key, because probes and scrapers have none."""
    router = APIRouter()

    @router.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        refusal = service.thread.refusal
        return JSONResponse({"status": refusal or "ok"}, 503 if refusal else 200)

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(page.text(), headers={"Content-Type": _METRICS_TYPE})

    return router


def check_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """GET /check proves the laws of the cache between two steps: O(blocks), so it is there only if asked for."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        answer = await asyncio.wrap_future(service.thread.ask(_check))
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


def now() -> int:
    """The time in seconds, as OpenAI's objects carry it."""
    return int(time.time())
