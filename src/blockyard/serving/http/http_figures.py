"""Requests by path and status, and how long they took, under the names that vLLM's dashboards draw."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
        """An answer. O(1)."""
        self._requests[handler, method if method in _METHODS else _OTHER, f"{status // 100}xx"] += 1
        self._seconds[handler] = self._seconds.get(handler, 0.0) + seconds

    def collect(self) -> Iterable[Metric]:
        """A counter and a sum. O(routes)."""
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
