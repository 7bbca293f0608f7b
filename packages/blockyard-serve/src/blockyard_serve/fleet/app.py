"""The application of an ingress: the routes of a server with one engine, and those that show the fleet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from blockyard.answers import HintOutcome, TenantUse
from blockyard.arguments import require_unicode
from blockyard.routing import Shares

from ..errors import ApiError, unavailable
from ..http.access import KeyGuard, require_tenants
from ..http.app import HttpMetrics, make_app
from ..http.live_routes import mount_page
from ..http.routes import RetainRequest, apply_hints, hint_routes, retain_prompt, retain_routes
from ..http.server_options import ServerOptions
from ..http.service import Service
from ..jobs.planner import Planner
from ..jobs.prompt_encoder import PromptEncoder
from ..jobs.request_metrics import RequestMetrics
from ..jobs.served_model import ServedModel
from ..live.live_page import fleet_page
from ..openai.responses import TokenTexts
from ..openai.session_hints import Hint
from .dispatcher import Dispatcher, RoutingPolicy
from .fleet_metrics import FleetCollector, FleetMetrics, FleetPage, TenantSums, fleet_state, merge_states
from .replica_request import ReplicaRequest
from .shared import shared_fleet

#: Timeout of a call of all replicas; maximum of prompts to compare.
_CALL_SECONDS, _MAX_PROMPTS = 20.0, 64

#: Returns the view ("state" or "comparison") of each ingress, this one's first.
ViewAll = Callable[[str], Awaitable[list[dict[str, Any]]]]
#: Outcomes of a hint, the best first.
_OUTCOMES = [each.value for each in (HintOutcome.ACCEPTED, HintOutcome.REFUSED, HintOutcome.UNKNOWN)]
#: Calls a function with each engine between two steps; returns the results and `ApiError`s.
CallEngines = Callable[[Callable[[Any], Any]], Awaitable[list[Any]]]


@dataclass(frozen=True, slots=True)
class FleetBackend:
    """The engines of an ingress.

    Attributes:
        handle: Ray Serve's handle of the engines.
        model: sizes of the model and cache of every replica.
        num_replicas: maximum number of replicas.
        policy: how requests are routed and resumed.
        name: name of this ingress, a label of its metrics.
    """

    handle: Any
    model: ServedModel
    tokenizer: Any
    num_replicas: int
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    name: str = "fleet"


@dataclass(frozen=True, slots=True)
class IngressPlan:
    """The arguments of an ingress in a separate process.

    Attributes:
        folder: folder of the model, for its tokenizer.
        num_replicas: maximum number of replicas.
        policy: how requests are routed and resumed.
        is_local: whether to open ports on loopback only.
    """

    folder: str
    num_replicas: int
    options: ServerOptions
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    is_local: bool = True


class IngressApp:
    """An ingress: the application in this process, and its view of the fleet. Raises like `create_app`.

    Args:
        options: options of the server; those about an engine have no effect.
        view_all: returns the views of all ingresses; None if this is the only one.
    """

    def __init__(self, backend: FleetBackend, options: ServerOptions, view_all: ViewAll | None = None) -> None:
        require_unicode("model_name", options.model_name)
        limits, model = options.limits, backend.model
        labels = {"engine": backend.name, "model_name": options.model_name}
        self._handle, self._model_name = backend.handle, options.model_name
        self._metrics, requests = FleetMetrics(), RequestMetrics(labels, model.max_model_len)
        policy = backend.policy
        self._fleet = shared_fleet(str(backend.handle.deployment_id), policy.cost, policy.heartbeat_timeout)
        self._generate = backend.handle.options(stream=True, method_name="generate")
        self._recent: deque[NDArray[np.int32]] = deque(maxlen=_MAX_PROMPTS if options.has_check else 0)
        capacity = backend.num_replicas * model.max_num_seqs + limits.max_waiting
        retry_after, roster = limits.retry_after_seconds, model.limits.roster
        counted = (self._metrics, requests, capacity, policy, retry_after, roster)
        dispatcher = Dispatcher(self._send, self._fleet, *counted)
        encoder = PromptEncoder(backend.tokenizer, model.vocab_size)
        planner = Planner(model, encoder, limits, capacity)
        service = Service(
            dispatcher, planner, TokenTexts(backend.tokenizer), limits, options.model_name, int(time.time())
        )
        guard, http = KeyGuard(options.api_key, options.tenant_keys), HttpMetrics()
        require_tenants(roster, options.tenant_keys)
        self._tenants: TenantSums | None = None
        if len(roster.names) > 1:
            self._fleet.share(Shares(model.limits, model.num_blocks - 1))
            self._tenants = TenantSums(partial(self._call_engines, tenant_uses), labels)
        page = FleetPage([http, requests, FleetCollector(self._fleet, self._metrics, labels)], self._tenants)
        self.app = make_app(service, encoder, model.hash_block_size, guard, http, page, options.cors_origins, True)

        async def view_this(what: str) -> list[dict[str, Any]]:
            return [await self.view(what)]

        view_all = view_all or view_this
        self.app.include_router(fleet_routes(view_all, guard))
        client = FleetEngines(self._call_engines)
        self.app.include_router(hint_routes(service, client, requests, guard))
        self.app.include_router(retain_routes(service, client, encoder, guard))
        mount_page(self.app, fleet_page())
        if options.has_check:
            self.app.include_router(check_routes(view_all, guard))

    def _send(self, request: ReplicaRequest) -> Any:
        if not request.extra_keys:
            self._recent.append(request.token_ids[: request.num_prompt])
        return self._generate.remote(request)

    async def _call_engines(self, function: Callable[[Any], Any]) -> list[Any]:
        results: list[Any] = await self._handle.broadcast("call", function).results_async(timeout_s=_CALL_SECONDS)
        return results

    async def view(self, what: str) -> dict[str, Any]:
        """Return the "state" of the fleet as this ingress knows it, or its "comparison" with the replicas' caches."""
        if what == "state":
            tenants = [] if self._tenants is None else await self._tenants.read()
            return fleet_state(self._fleet, self._metrics, self._model_name, tenants)
        try:
            return await self._compared(list(self._recent))
        except Exception as error:  # for example, a replica has just died
            return {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}

    async def _compared(self, prompts: list[NDArray[np.int32]]) -> dict[str, Any]:
        """Compare the router's knowledge of recent prompts with the replicas' caches."""
        # A hit always ends before the last token, so append one: then both sides report the whole prompt.
        longer = [np.append(prompt, prompt[-1]) for prompt in prompts]
        results = await self._handle.broadcast("inspect", longer).results_async(timeout_s=_CALL_SECONDS)
        claims = self._fleet.hits(longer)
        self._fleet.check()
        differences = [
            {"replica": name, "prompt": number, "held": held[number], "mirror": claim.get(name, 0)}
            for name, _, held, _ in results
            for number, claim in enumerate(claims)
            if held[number] != claim.get(name, 0)
        ]
        problems = {name: problem for name, _, _, problem in results if problem}
        return {
            "ok": not differences and not problems,
            "replicas": {name: process for name, process, _, _ in results},
            "compared": len(results) * len(prompts),
            "differences": differences[:20],
            "problems": problems,
            "booked": sum(each.requests for each in self._fleet.status()),
        }


def tenant_uses(engine: Any) -> tuple[TenantUse, ...]:
    """Return the use of an engine's pool by tenant."""
    uses: tuple[TenantUse, ...] = engine.cache.stats().tenants
    return uses


def fleet_routes(view_all: ViewAll, guard: KeyGuard) -> APIRouter:
    """Return GET /fleet, which needs the server's own key."""
    router = APIRouter(dependencies=[Depends(guard.require_server_key)])

    @router.get("/fleet")
    async def show() -> dict[str, Any]:
        return merge_states(await view_all("state"))

    return router


def check_routes(view_all: ViewAll, guard: KeyGuard) -> APIRouter:
    """Return GET /check, which compares routers with replicas; needs the server's own key. For tests."""
    router = APIRouter(dependencies=[Depends(guard.require_server_key)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        """Wait until every mirror agrees with the replicas."""
        answer: dict[str, Any] = {}
        for _ in range(10):  # events take some milliseconds to arrive
            views = await view_all("comparison")
            answer = next((view for view in views if not view["ok"]), views[0])
            if answer["ok"]:
                totals = {name: sum(view[name] for view in views) for name in ("compared", "booked")}
                return JSONResponse(answer | totals | {"ingresses": len(views)})
            await asyncio.sleep(0.2)
        return JSONResponse(answer, 500)

    return router


class FleetEngines:
    """The `EngineClient` of a fleet: calls every engine."""

    def __init__(self, call: CallEngines) -> None:
        self._call = call

    async def hint(self, hints: list[Hint]) -> list[str]:
        """Apply hints to every engine, because a session may have used several. Return the best outcome of each."""
        by_engine = _successes(await self._call(partial(apply_hints, hints)))
        return [min(outcomes, key=_OUTCOMES.index) for outcomes in zip(*by_engine, strict=True)]

    async def retain_prompt(self, request: RetainRequest) -> tuple[int, int]:
        """Retain a prompt in every engine. Return the counts of the engine that retains most."""
        counts: list[tuple[int, int]] = _successes(await self._call(partial(retain_prompt, request)))
        return max(counts, key=lambda count: count[::-1])


def _successes(results: list[Any]) -> list[Any]:
    """Return the results without errors. If there are only errors, raise the first one."""
    successes = [each for each in results if not isinstance(each, ApiError)]
    if not successes:
        raise results[0] if results else unavailable("no replica is ready", 1)
    return successes
