"""The application: paths, errors in one form, and the engine thread's life around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...arguments import require_unicode
from ...engine import Engine
from ..errors import ApiError, failed
from ..jobs.engine_thread import EngineThread
from ..jobs.metrics import MetricsPage
from ..jobs.planner import Planner
from ..jobs.prompts import PromptEncoder
from ..limits import ServerLimits
from ..openai.logprobs import TokenTexts
from .api_key import KeyGuard
from .routes import Service, check_routes, now, openai_routes, operator_routes


def create_app(
    engine: Engine,
    model_name: str,
    limits: ServerLimits | None = None,
    api_key: str | None = None,
    has_check: bool = False,
) -> FastAPI:
    """The application around an engine, which belongs to it from now on.

    model_name: what clients call the model. api_key: what they must send as bearer token; none if None. has_check:
    whether GET /check is there. `app.state.engine_thread` is the thread; it runs from the application's start to its
    end (the lifespan of ASGI). Raises `InvalidArgument` for an engine without a tokenizer, and for a name that no
    answer could carry.
    """
    require_unicode("model_name", model_name)
    limits = limits or ServerLimits()
    capacity = engine.cache.config.max_num_seqs + limits.max_waiting
    thread = EngineThread(engine, capacity, model_name, limits.retry_after_seconds)
    encoder = PromptEncoder(engine)
    planner = Planner(engine, encoder, limits, capacity)
    service = Service(thread, planner, TokenTexts(engine.tokenizer), limits, model_name, now())
    guard = KeyGuard(api_key)
    # The pages that FastAPI would add load scripts from elsewhere, and the bodies are read by hand.
    # It would also send clients from a path with a slash too many to http, and their keys with them.
    off: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Blockyard", lifespan=_lifespan, **off)
    app.state.engine_thread, app.state.encoder, app.state.limits = thread, encoder, limits
    page = MetricsPage(thread.request_figures.registry, lambda: thread.figures, model_name)
    app.include_router(openai_routes(service, guard))
    app.include_router(operator_routes(service, page))
    if has_check:
        app.include_router(check_routes(service, guard))
    app.add_exception_handler(ApiError, _show_api_error)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, _show_failure)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.engine_thread.start()
    try:
        yield
    finally:
        app.state.encoder.close()
        app.state.engine_thread.stop(app.state.limits.drain_seconds)


async def _show_api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    hint = "" if error.status_code != 404 or path.startswith("/v1/") else "; OpenAI's paths begin with /v1/ here"
    shown = ApiError(error.status_code, f"{request.method[:20]} {path[:200]}: {error.detail}{hint}")
    return JSONResponse(shown.body(), shown.status, dict(error.headers or {}))


async def _show_failure(request: Request, error: Exception) -> Response:  # noqa: ARG001
    # Starlette raises the error again behind this answer, so the server's log has all of it.
    return JSONResponse(failed().body(), 500)
