"""GET /check verifies the invariants of the cache between two steps: O(blocks), so it is there only if asked for."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from ...engine import Engine
from ...errors import InvariantError
from .api_key import KeyGuard
from .service import Service


def check_routes(service: Service, guard: KeyGuard) -> APIRouter:
    """GET /check, behind the key."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        """GET /check: verify the cache between two steps."""
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
