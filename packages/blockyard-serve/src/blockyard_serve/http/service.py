"""The paths share who runs jobs, one model, and requests that are read, run and answered."""

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
from ..openai.responses import Form, TokenTexts
from .access import tenant_of
from .body import read_body
from .request_log import entry_of
from .run import Deadline, Run, while_connected
from .streaming import EventStream

WantedT = TypeVar("WantedT")
WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True)
class Service:
    """What the paths need. model_name: what clients call the model."""

    runner: JobRunner
    planner: Planner
    texts: TokenTexts
    limits: ServerLimits
    model_name: str
    created: int

    async def answer(self, request: Request, kind: type[GenerationFields], form: type[Form]) -> Response:
        """Read a request, run it, and answer whole or in pieces. Raises `ApiError`."""
        deadline, entry = Deadline(self.limits.request_seconds), entry_of(request.scope)
        self.runner.require_place()
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
        """Return the body, as `parse` understands it. Raises `ApiError`."""
        body = await read_body(request, self.limits)
        return await asyncio.to_thread(parse, body)  # a large one takes long; others go on

    def require_model(self, name: str | None) -> None:
        """Raise `ApiError` (404) for a model that is not this one; None for a request that names none."""
        if name not in (None, self.model_name):
            message = (
                f"the model '{name[:100]}' does not exist; this server has '{self.model_name}' and no LoRA adapters"
            )
            raise ApiError(404, message, code="model_not_found", param="model")

    def model(self) -> dict[str, Any]:
        """Return the model as /v1/models shows it."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "blockyard",
            "max_model_len": self.planner.max_model_len,
        }


async def within(deadline: Deadline, request: Request, work: Coroutine[Any, Any, WorkT]) -> WorkT:
    """Return the result of `work`; raises `ApiError` (504) at the deadline, and `ClientGone` when the client leaves."""
    async with deadline.hold():
        return await while_connected(work, request.receive)
