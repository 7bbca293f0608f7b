"""The application: paths, errors in one form, and the engine thread's life around it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

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
from ..jobs.prompts import PromptEncoder
from ..jobs.served_model import ServedModel
from ..jobs.tracing import RequestTracer
from ..limits import ServerLimits
from ..openai.responses import TokenTexts
from .access import KeyGuard, allow_origins, require_tenants
from .live_routes import add_live_page
from .routes import (
    OneEngine,
    check_routes,
    hint_routes,
    openai_routes,
    operator_routes,
    retain_routes,
    tokenizer_routes,
    why_absent,
)
from .run import ClientGone
from .service import Service

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


#: Asked by probes and scrapers all the time; not counted.
PROBES = frozenset({"/health", "/metrics", "/ping", "/version"})
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS"})
#: Of paths that no route has, and of methods beside those: what clients make up gets no series of its own.
_NONE, _OTHER = "none", "OTHER"


class HttpFigures(Collector):
    """`http_requests_total` by handler, method and class of status, and `http_request_duration_seconds` by handler.

    One thread counts and reads: that of the server's event loop. A handler is the path of a route.
    """

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._seconds: dict[str, float] = {}

    def count(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answer. O(1)."""
        self._requests[handler, method if method in _METHODS else _OTHER, f"{status // 100}xx"] += 1
        self._seconds[handler] = self._seconds.get(handler, 0.0) + seconds

    def collect(self) -> Iterable[Metric]:
        """Return a counter and a sum. O(routes)."""
        requests = CounterMetricFamily("http_requests", "Answers.", labels=["handler", "method", "status"])
        seconds = SummaryMetricFamily("http_request_duration_seconds", "Until the last byte.", labels=["handler"])
        numbers: Counter[str] = Counter()
        for (handler, method, status), number in self._requests.items():
            requests.add_metric([handler, method, status], number)
            numbers[handler] += number
        for handler, total in self._seconds.items():
            seconds.add_metric([handler], numbers[handler], total)
        return [requests, seconds]


class CountedRequests:
    """ASGI around the application: counts each answer when its last byte is sent, or the client is gone."""

    def __init__(self, app: ASGIApp, figures: HttpFigures) -> None:
        self._app = app
        self._figures = figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on. O(1)."""
        if scope["type"] != "http" or scope["path"] in PROBES:
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500  # of what the application does not catch

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", None) or _NONE
            self._figures.count(route, scope["method"], status, time.perf_counter() - started)


class PathsWithSlash:
    """ASGI around the application: answers a path with a slash at its end as it does without, and redirects nobody.

    A redirect would name the scheme that this server sees, http behind a proxy, and send the client's key there.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on. O(1)."""
        if scope["type"] == "http" and len(scope["path"]) > 1 and not _is_page(scope["path"]):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self._app(scope, receive, send)


def _is_page(path: str) -> bool:
    return path.startswith("/ui/")


def create_app(
    engine: Engine,
    model_name: str,
    limits: ServerLimits | None = None,
    api_key: str | None = None,
    has_check: bool = False,
    cors_origins: Sequence[str] = (),
    status_seconds: float = 10.0,
    tenant_metrics: int = 0,
    tracer: Tracer | None = None,
    ui: str = "off",
    tenant_keys: Mapping[str, str] | None = None,
) -> FastAPI:
    """Return the application around an engine, which belongs to it from now on.

    model_name: what clients call the model. api_key: what they must send as bearer token; none if None. has_check:
    whether GET /check is there. cors_origins: of web pages that may use it from a browser. status_seconds: of work
    between two lines of the log (INFO, `blockyard_serve.status`) that say how it goes; 0 for none.
    tenant_metrics: tenants that GET /metrics shows by name, at most 100; 0 for none. tracer: of OpenTelemetry,
    gets spans of every request; None for none. ui: what the page under /ui shows: "text" (prompts too), "map" (no
    prompts), or "off" for no page. tenant_keys: the API key of each tenant that has one, by its name.

    `app.state.engine_thread` is the thread; it runs from the application's start to its end (the lifespan of ASGI).
    Raises `InvalidArgument` for an engine without a tokenizer, for a name that no answer could carry, for what is no
    origin, for another `ui`, and for numbers outside their limits.
    """
    require_unicode("model_name", model_name)
    limits = limits or ServerLimits()
    capacity = engine.cache.config.max_num_seqs + limits.max_waiting
    spans = None if tracer is None else RequestTracer(tracer, engine.cache.block_size, model_name)
    options: dict[str, Any] = {"tracer": spans, "status_seconds": status_seconds, "tenant_metrics": tenant_metrics}
    thread = EngineThread(engine, capacity, model_name, limits.retry_after_seconds, **options)
    model = ServedModel.of(engine)
    encoder = PromptEncoder(engine.tokenizer, model.vocab_size)
    planner = Planner(model, encoder, limits, capacity)
    service = Service(thread, planner, TokenTexts(engine.tokenizer), limits, model_name, int(time.time()))
    guard, figures = KeyGuard(api_key, tenant_keys), HttpFigures()
    require_tenants(model.limits.roster, tenant_keys or {})
    page = MetricsPage(thread, engine, [figures])
    app = app_of(service, encoder, model.hash_block_size, guard, figures, page, cors_origins, ui != "off")
    app.state.engine_thread = thread
    app.include_router(hint_routes(service, OneEngine(thread), thread.request_figures, guard))
    app.include_router(retain_routes(service, OneEngine(thread), encoder, guard))
    if has_check:
        app.include_router(check_routes(thread, guard))
    add_live_page(app, thread, encoder, model_name, guard, ui)
    return app


def app_of(
    service: Service,
    encoder: PromptEncoder,
    block_size: int,
    guard: KeyGuard,
    figures: HttpFigures,
    page: Page,
    cors_origins: Sequence[str],
    has_ui: bool,
) -> FastAPI:
    """Return an application with the paths that need no engine in this process.

    block_size: tokens of a block that can be hit. figures: counts its answers. page: what GET /metrics shows.
    `app.state.runner` runs from the application's start to its end. Raises `InvalidArgument` for what is no origin.
    """
    # The pages that FastAPI would add load scripts from elsewhere, and the bodies are read by hand.
    # It would also send clients from a path with a slash too many to http, and their keys with them.
    off: dict[str, Any] = {"openapi_url": None, "docs_url": None, "redoc_url": None, "redirect_slashes": False}
    app = FastAPI(title="Blockyard", lifespan=_lifespan, **off)
    app.state.runner, app.state.encoder = service.runner, encoder
    app.state.stop_seconds = service.limits.drain_seconds  # for the step that runs when the application ends
    app.include_router(openai_routes(service, guard))
    app.add_middleware(CountedRequests, figures=figures)
    app.add_middleware(PathsWithSlash)
    app.include_router(operator_routes(service, page, has_ui))
    app.include_router(tokenizer_routes(service, encoder, block_size, guard))
    allow_origins(app, cors_origins)
    add_error_forms(app)
    return app


def add_error_forms(app: FastAPI) -> None:
    """Have errors answered in OpenAI's form."""
    app.add_exception_handler(ApiError, _show_api_error)
    app.add_exception_handler(ClientGone, _show_nothing)
    app.add_exception_handler(HTTPException, _show_http_error)
    app.add_exception_handler(Exception, _show_failure)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.runner.start()
    try:
        yield
    finally:
        app.state.encoder.close()
        app.state.runner.stop(app.state.stop_seconds)


async def _show_api_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status, error.headers())


async def _show_nothing(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=499)  # the client has left, and nothing reads it


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    why = why_absent(path) if error.status_code == 404 else None
    hint = f"; {why}" if why else ""
    shown = ApiError(error.status_code, f"{request.method[:20]} {path[:200]}: {error.detail}{hint}")
    return JSONResponse(shown.body(), shown.status, dict(error.headers or {}))


async def _show_failure(request: Request, error: Exception) -> Response:  # noqa: ARG001
    # Starlette raises the error again behind this answer, so the server's log has all of it.
    return JSONResponse(failed().body(), 500)
