"""POST /v1/hints: clients say what comes next of their sessions."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine import Engine
from ..jobs.session_names import session_name
from ..openai.hints import Hint, parse_hints
from .api_key import KeyGuard
from .deadline import Deadline
from .service import Service, within


def hint_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """The path, behind the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.post("/hints", response_model=None)
    async def hints(request: Request) -> Response:
        """POST /v1/hints: what came of each hint, in order."""
        service.thread.require_place(0)
        deadline = Deadline(service.limits.request_seconds)
        said = await service.read(request, parse_hints)
        outcomes = await within(deadline, request, _tell(service, said))
        answers = [hint.answer(outcome) for hint, outcome in zip(said, outcomes, strict=True)]
        return JSONResponse({"object": "list", "data": answers})

    return router


async def _tell(service: Service, said: list[Hint]) -> list[str]:
    """What came of each, between two steps of the engine."""

    def tell(engine: Engine) -> list[str]:
        return [_told(engine, hint) for hint in said]

    outcomes = await asyncio.wrap_future(service.thread.ask(tell))
    for outcome in outcomes:
        service.thread.request_figures.count_hint(outcome)
    return outcomes


def _told(engine: Engine, hint: Hint) -> str:
    name = session_name(hint.session_id, hint.cache_salt)
    arguments: dict[str, Any] = {"over": hint.action == "over", "back_in": hint.back_in}
    return engine.hint(name, **arguments).value
