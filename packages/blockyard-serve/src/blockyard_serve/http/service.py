"""The parts that routes share: reading, running and answering requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import ApiError
from ..jobs.job import JobRunner
from ..jobs.planner import Planner
from ..limits import ServerLimits
from ..openai.protocol import GenerationFields, parse_request
from ..openai.responses import ResponseBuilder, TokenTexts
from .access import tenant_of
from .body import read_body
from .request_log import entry_of
from .request_run import Deadline, Run, while_connected
from .streaming import EventStream

WantedT = TypeVar("WantedT")
WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True)
class Service:
    """The dependencies of routes.

    Attributes:
        created: Unix time at which the server started.
    """

    runner: JobRunner
    planner: Planner
    texts: TokenTexts
    limits: ServerLimits
    model_name: str
    created: int

    async def answer(self, request: Request, kind: type[GenerationFields], form: type[ResponseBuilder]) -> Response:
        """Run a request that generates; return the whole response or a stream. Raises `ApiError`."""
        deadline, entry = Deadline(self.limits.request_seconds), entry_of(request.scope)
        self.runner.require_capacity()
        wanted = await self.read(request, lambda body: parse_request(kind, body))
        self.require_model(wanted.model)
        shape = form(self.model_name, self.texts, wanted.num_logprobs is not None)
        planned = self.planner.jobs(wanted, deadline.arrived_at, entry.request_id, tenant_of(request))
        jobs = await within(deadline, request, planned)
        if self.runner.tracer is not None:
            parent = self.runner.tracer.context_of(request.headers)
            for job in jobs:
                job.parent = parent
        run = Run(self.runner, jobs, deadline)
        if wanted.stream:
            return EventStream(run, shape, wanted.wants_usage, wanted.wants_continuous_usage)
        try:
            with run:
                return JSONResponse(shape.response(await run.results_for(request)))
        finally:
            entry.note_results(run.finished.values())

    async def read(self, request: Request, parse: Callable[[bytes], WantedT]) -> WantedT:
        """Return the parsed body of a request. Raises `ApiError`."""
        body = await read_body(request, self.limits)
        return await asyncio.to_thread(parse, body)  # parsing a large one takes long

    def require_model(self, name: str | None) -> None:
        """Raise `ApiError` (404) if a request names another model."""
        if name not in (None, self.model_name):
            served = f"this server serves '{self.model_name}', without LoRA adapters"
            raise ApiError(
                404, f"the model '{name[:100]}' does not exist; {served}", code="model_not_found", param="model"
            )

    def model(self) -> dict[str, Any]:
        """Return the model object of /v1/models."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockyard",
            "max_model_len": self.planner.max_model_len,
        }


async def within(deadline: Deadline, request: Request, work: Coroutine[Any, Any, WorkT]) -> WorkT:
    """Return the result of `work`. Raises `ApiError` (504) at the deadline, `ClientGone` if the client leaves."""
    async with deadline.hold():
        return await while_connected(work, request.receive)
