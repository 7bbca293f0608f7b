"""POST /v1/retain: clients say whose cached blocks stay longer."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...engine import Engine
from ...errors import OverBudget
from ...keys import CacheSalt
from ..errors import ApiError, invalid
from ..jobs.prompts import PromptEncoder
from ..openai.retaining import RetainChat, RetainText, parse_retain
from .api_key import KeyGuard
from .run import Deadline
from .service import Service, within


def retain_routes(service: Service, encoder: PromptEncoder, guard: KeyGuard) -> APIRouter:
    """Return the path, behind the key."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(guard)])

    @router.post("/retain", response_model=None)
    async def retain(request: Request) -> Response:
        """Answer POST /v1/retain: how many blocks are retained, of how many tokens."""
        service.thread.require_place(0)
        deadline = Deadline(service.limits.request_seconds)
        wanted = await service.read(request, parse_retain)
        service.require_model(wanted.model)
        return JSONResponse(await within(deadline, request, _retained(service, encoder, wanted)))

    return router


async def _retained(service: Service, encoder: PromptEncoder, wanted: RetainText | RetainChat) -> dict[str, int | str]:
    prompt = await encoder.encode(wanted.prompt_field, wanted.content, wanted.adds_special_tokens)
    keys = () if wanted.cache_salt is None else (CacheSalt(wanted.cache_salt),)

    def retain(engine: Engine) -> int:
        if not engine.cache.config.retention_blocks:
            raise invalid("this server retains nothing; start it with --retention-blocks")
        try:
            return engine.retain(prompt.token_ids, wanted.priority, wanted.seconds, extra_keys=keys)
        except OverBudget as error:
            raise ApiError(409, str(error), code="over_budget") from None

    num_blocks = await asyncio.wrap_future(service.thread.ask(retain))
    return {"object": "retention", "num_blocks": num_blocks, "num_tokens": len(prompt.token_ids)}
