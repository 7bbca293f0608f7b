"""The application: routes, error responses, and the lifespan of the engine thread."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockyard.arguments import require_unicode
from blockyard_engine import Engine

from ..errors import ApiError, failed
from ..jobs.engine_thread import EngineThread
from ..jobs.metrics_page import MetricsPage, Page
from ..jobs.planner import Planner
from ..jobs.prompt_encoder import PromptEncoder
from ..jobs.served_model import ServedModel
from ..jobs.tracing import RequestTracer
from ..openai.responses import TokenTexts
from .access import KeyGuard, allow_origins, require_tenants
from .live_routes import add_live_page
from .request_run import ClientGone
from .routes import (
    SingleEngine,
    absence_reason,
    check_routes,
    hint_routes,
    openai_routes,
    operator_routes,
    retain_routes,
    tokenizer_routes,
)
from .server_options import ServerOptions
from .service import Service

#: Paths of probes and scrapers, which are not counted.
PROBES = frozenset({"/health", "/metrics", "/ping", "/version"})
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
#: Labels for paths without a route and for other methods, so that clients cannot create series.
_NONE, _OTHER = "none", "OTHER"


class HttpMetrics(Collector):
    """Counts responses by route, method and status class, and sums their durations by route.

    Only the event loop's thread counts and collects.
    """

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[str, float] = {}

    def count(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count a response. O(1)."""
        self._requests[handler, method if method in _METHODS else _OTHER, f"{status // 100}xx"] += 1
        self._seconds[handler] = self._seconds.get(handler, 0.0) + seconds

    def collect(self) -> Iterable[Metric]:
        """Return the metrics. O(routes)."""
        requests = CounterMetricFamily("http_requests", "Responses.", labels=["handler", "method", "status"])
        seconds = SummaryMetricFamily(
            "http_request_duration_seconds", "Seconds until the last byte.", labels=["handler"]
        )
        numbers: Counter[str] = Counter()
        for (handler, method, status), number in self._requests.items():
            requests.add_metric([handler, method, status], number)
            numbers[handler] += number
        for handler, total in self._seconds.items():
            seconds.add_metric([handler], numbers[handler], total)
        return [requests, seconds]


class CountedRequests:
    """ASGI middleware that counts each response when it ends or its client leaves."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500  # if the application raises

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", None) or _NONE
            self._metrics.count(route, scope["method"], status, time.perf_counter() - started)


class PathsWithSlash:
    """ASGI middleware that ignores a trailing slash of the path, instead of redirecting the client.

    A redirect would name the scheme that this server sees, which is http if a proxy is in front. The client would then
    send its key over http.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1 and not scope["path"].startswith("/ui/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """Return the ASGI application that serves an engine. The engine belongs to it from now on.

    `app.state.engine_thread` is the engine thread; it runs during the application's lifespan.

    Args:
        engine: the engine.
        options: options of the server. `host`, `port`, `allowed_hosts`, `access_log` and the limits on connections
            have no effect: they belong to the server around the application.

    Raises:
        InvalidArgument: for an engine without a tokenizer, or an option outside its limits.
    """
    model_name, limits = options.model_name, options.limits
    require_unicode("model_name", model_name)
    capacity = engine.cache.config.max_num_seqs + limits.max_waiting
    tracer = options.tracer
    thread = EngineThread(
        engine,
        capacity,
        model_name,
        limits.retry_after_seconds,
        tracer=None if tracer is None else RequestTracer(tracer, engine.cache.block_size, model_name),
        status_seconds=options.status_seconds,
        tenant_metrics=options.tenant_metrics,
    )
    model = ServedModel.of(engine)
    encoder = PromptEncoder(engine.tokenizer, model.vocab_size)
    planner = Planner(model, encoder, limits, capacity)
    service = Service(thread, planner, TokenTexts(engine.tokenizer), limits, model_name, int(time.time()))
    guard, metrics = KeyGuard(options.api_key, options.tenant_keys), HttpMetrics()
    require_tenants(model.limits.roster, options.tenant_keys)
    page = MetricsPage(thread, engine, [metrics])
    app = make_app(
        service, encoder, model.hash_block_size, guard, metrics, page, options.cors_origins, options.ui != "off"
    )
    app.state.engine_thread = thread
    app.include_router(hint_routes(service, SingleEngine(thread), thread.request_metrics, guard))
    app.include_router(retain_routes(service, SingleEngine(thread), encoder, guard))
    if options.has_check:
        app.include_router(check_routes(thread, guard))
    add_live_page(app, thread, encoder, model_name, guard, options.ui)
    return app


def make_app(
    service: Service,
    encoder: PromptEncoder,
    block_size: int,
    guard: KeyGuard,
    metrics: HttpMetrics,
    page: Page,
    cors_origins: Sequence[str],
    has_ui: bool,
) -> FastAPI:
    """Return an application with the routes that need no engine in this process.

    `app.state.runner` runs during the application's lifespan. `page` renders GET /metrics; `block_size` is the number
    of tokens in a block that can be hit. Raises `InvalidArgument` for an invalid origin.
    """
    # FastAPI's own pages load scripts from other sites and cannot describe bodies that are parsed by hand.
    # Its redirects of trailing slashes are replaced by `PathsWithSlash`.
    off: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Blockyard", lifespan=_lifespan, **off)
    app.state.runner, app.state.encoder = service.runner, encoder
    app.state.stop_seconds = service.limits.drain_seconds  # for the step that is running at shutdown
    app.include_router(openai_routes(service, guard))
    app.add_middleware(CountedRequests, metrics=metrics)
    app.add_middleware(PathsWithSlash)
    app.include_router(operator_routes(service, page, has_ui))
    app.include_router(tokenizer_routes(service, encoder, block_size, guard))
    allow_origins(app, cors_origins)
    add_error_handlers(app)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors in OpenAI's format."""

    async def show_api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
        assert isinstance(error, ApiError)
        return JSONResponse(error.body(), error.status, error.headers())

    async def show_nothing(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return Response(status_code=499)  # the client has left: nothing reads it

    async def show_failure(request: Request, error: Exception) -> Response:  # noqa: ARG001
        return JSONResponse(failed().body(), 500)  # Starlette raises the error again, which writes it to the log

    app.add_exception_handler(ApiError, show_api_error)
    app.add_exception_handler(ClientGone, show_nothing)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, show_failure)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.runner.start()
    try:
        yield
    finally:
        app.state.encoder.close()
        app.state.runner.stop(app.state.stop_seconds)


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    why = absence_reason(path) if error.status_code == 404 else None
    hint = f"; {why}" if why else ""
    shown = ApiError(error.status_code, f"{request.method[:20]} {path[:200]}: {error.detail}{hint}")
    return JSONResponse(shown.body(), shown.status, dict(error.headers or {}))
