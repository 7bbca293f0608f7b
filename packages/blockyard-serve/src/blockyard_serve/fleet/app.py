"""The application before a fleet has the paths of a server of one engine, and those that show the fleet."""

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
from ..http.app import HttpFigures, app_of
from ..http.live_routes import lead_to_page
from ..http.routes import Wish, hint_routes, retain, retain_routes, tell
from ..http.server import ServerOptions
from ..http.service import Service
from ..jobs.planner import Planner
from ..jobs.prompts import PromptEncoder
from ..jobs.request_figures import RequestFigures
from ..jobs.served_model import ServedModel
from ..live.page import fleet_page
from ..openai.hints import Hint
from ..openai.responses import TokenTexts
from .asks import ReplicaAsk
from .dispatcher import Dispatcher, Endurance
from .figures import FleetCollector, FleetFigures, FleetPage, TenantSums, fleet_state, one_state
from .shared import shared_fleet

#: Seconds that a look at all replicas may take, and prompts that are compared.
_LOOK_SECONDS, _MAX_PROMPTS = 20.0, 64


#: Asks for a look ("state" or "comparison") at each ingress; returns what they say, this one first.
AskAll = Callable[[str], Awaitable[list[dict[str, Any]]]]
#: The first of these that an engine says is what came of a hint.
_BEST = [each.value for each in (HintOutcome.ACCEPTED, HintOutcome.REFUSED, HintOutcome.UNKNOWN)]
#: Has each engine do something between two steps; returns what they say, errors for clients included.
AskEngines = Callable[[Callable[[Any], Any]], Awaitable[list[Any]]]


@dataclass(frozen=True, slots=True)
class Fleetwork:
    """This stands behind the address. handle: Ray Serve's. model: of all replicas. cost, silence: of the router.

    name: of this ingress, a label of its metrics.
    """

    handle: Any
    model: ServedModel
    tokenizer: Any
    num_replicas: int
    cost: str = "robust"
    silence: float = 3.0
    endurance: Endurance = field(default_factory=Endurance)
    name: str = "fleet"


@dataclass(frozen=True, slots=True)
class IngressPlan:
    """Says what an ingress in a process of its own is made of.

    folder: of the model, for its tokenizer. num_replicas: at most. is_local: whether its ports are on loopback.
    """

    folder: str
    num_replicas: int
    options: ServerOptions
    cost: str = "robust"
    silence: float = 3.0
    endurance: Endurance = field(default_factory=Endurance)
    is_local: bool = True


class Front:
    """Is an ingress: an application in this process, and two looks at what it knows. Raises as `create_app`.

    options: those of a server that speak of its engine count for nothing. ask_all: where there are other ingresses.
    """

    def __init__(self, work: Fleetwork, options: ServerOptions, ask_all: AskAll | None = None) -> None:
        require_unicode("model_name", options.model_name)
        limits, model = options.limits, work.model
        labels = {"engine": work.name, "model_name": options.model_name}
        self._handle, self._model_name = work.handle, options.model_name
        self._figures, requests = FleetFigures(), RequestFigures(labels, model.max_model_len)
        self._fleet = shared_fleet(str(work.handle.deployment_id), work.cost, work.silence)
        self._generate = work.handle.options(stream=True, method_name="generate")
        self._recent: deque[NDArray[np.int32]] = deque(maxlen=_MAX_PROMPTS if options.has_check else 0)
        capacity = work.num_replicas * model.max_num_seqs + limits.max_waiting
        endurance, retry_after = work.endurance, limits.retry_after_seconds
        roster = model.limits.roster
        counted = (self._figures, requests, capacity, endurance, retry_after, roster)
        dispatcher = Dispatcher(self._send, self._fleet, *counted)
        encoder = PromptEncoder(work.tokenizer, model.vocab_size)
        planner = Planner(model, encoder, limits, capacity)
        service = Service(dispatcher, planner, TokenTexts(work.tokenizer), limits, options.model_name, int(time.time()))
        guard, http = KeyGuard(options.api_key, options.tenant_keys), HttpFigures()
        require_tenants(roster, options.tenant_keys)
        self._tenants: TenantSums | None = None
        if len(roster.names) > 1:
            self._fleet.share(Shares(model.limits, model.num_blocks - 1))
            self._tenants = TenantSums(partial(self._ask_engines, tenant_uses), labels)
        page = FleetPage([http, requests, FleetCollector(self._fleet, self._figures, labels)], self._tenants)
        self.app = app_of(service, encoder, model.hash_block_size, guard, http, page, options.cors_origins, True)
        ask_all = ask_all or self._ask_alone
        self.app.include_router(fleet_routes(ask_all, guard))
        asker = AllEngines(self._ask_engines)
        self.app.include_router(hint_routes(service, asker, requests, guard))
        self.app.include_router(retain_routes(service, asker, encoder, guard))
        lead_to_page(self.app, fleet_page())
        if options.has_check:
            self.app.include_router(check_routes(ask_all, guard))

    def _send(self, ask: ReplicaAsk) -> Any:
        if not ask.extra_keys:
            self._recent.append(ask.token_ids[: ask.num_prompt])
        return self._generate.remote(ask)

    async def _ask_engines(self, call: Callable[[Any], Any]) -> list[Any]:
        told: list[Any] = await self._handle.broadcast("ask", call).results_async(timeout_s=_LOOK_SECONDS)
        return told

    async def _ask_alone(self, what: str) -> list[dict[str, Any]]:
        return [await self.look(what)]

    async def look(self, what: str) -> dict[str, Any]:
        """Return the "state" of the fleet as this ingress knows it, or the "comparison" of that with the truth."""
        if what == "state":
            tenants = [] if self._tenants is None else await self._tenants.read()
            return fleet_state(self._fleet, self._figures, self._model_name, tenants)
        try:
            return await self._compared(list(self._recent))
        except Exception as error:  # a replica that has just died, say
            return {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}

    async def _compared(self, prompts: list[NDArray[np.int32]]) -> dict[str, Any]:
        """Ask all replicas what they hold of the last prompts."""
        # One token more: of a whole prompt both say what can be used of it, which ends before the last token.
        longer = [np.append(prompt, prompt[-1]) for prompt in prompts]
        told = await self._handle.broadcast("inspect", longer).results_async(timeout_s=_LOOK_SECONDS)
        claims = self._fleet.hits(longer)
        self._fleet.check()
        differences = [
            {"replica": name, "prompt": number, "held": held[number], "mirror": claim.get(name, 0)}
            for name, _, held, _ in told
            for number, claim in enumerate(claims)
            if held[number] != claim.get(name, 0)
        ]
        problems = {name: problem for name, _, _, problem in told if problem}
        return {
            "ok": not differences and not problems,
            "replicas": {name: process for name, process, _, _ in told},
            "compared": len(told) * len(prompts),
            "differences": differences[:20],
            "problems": problems,
            "booked": sum(each.requests for each in self._fleet.status()),
        }


def tenant_uses(engine: Any) -> tuple[TenantUse, ...]:
    """Return what each tenant has of an engine's pool."""
    uses: tuple[TenantUse, ...] = engine.cache.stats().tenants
    return uses


def fleet_routes(ask_all: AskAll, guard: KeyGuard) -> APIRouter:
    """GET /fleet, behind the server's own key."""
    router = APIRouter(dependencies=[Depends(guard.own)])

    @router.get("/fleet")
    async def show() -> dict[str, Any]:
        """Return the replicas, what became of claims, and the last choices with their why, of all ingresses."""
        return one_state(await ask_all("state"))

    return router


def check_routes(ask_all: AskAll, guard: KeyGuard) -> APIRouter:
    """GET /check, behind the server's own key: the routers' knowledge and books against the truth. For tests."""
    router = APIRouter(dependencies=[Depends(guard.own)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        """Wait for a moment at which all mirrors say what the replicas hold."""
        answer: dict[str, Any] = {}
        for _ in range(10):  # events are on their way for some milliseconds
            looks = await ask_all("comparison")
            answer = next((look for look in looks if not look["ok"]), looks[0])
            if answer["ok"]:
                totals = {name: sum(look[name] for look in looks) for name in ("compared", "booked")}
                return JSONResponse(answer | totals | {"ingresses": len(looks)})
            await asyncio.sleep(0.2)
        return JSONResponse(answer, 500)

    return router


class AllEngines:
    """Asks the engines of a fleet (an `EngineAsker`), each of which has sessions and prompts of its own."""

    def __init__(self, ask: AskEngines) -> None:
        self._ask = ask

    async def hint(self, said: list[Hint]) -> list[str]:
        """Give the hints to all: a session may have been on several. Of what came of each, return the best."""
        told = _counts(await self._ask(partial(tell, said)))
        return [min(outcomes, key=_BEST.index) for outcomes in zip(*told, strict=True)]

    async def retain(self, wish: Wish) -> tuple[int, int]:
        """Have each retain what it has of the prompt; return the numbers of the one that retains most."""
        counts: list[tuple[int, int]] = _counts(await self._ask(partial(retain, wish)))
        return max(counts, key=lambda count: count[::-1])


def _counts(told: list[Any]) -> list[Any]:
    """Return answers without errors. Raises `ApiError`, the first one, where there is no other answer."""
    answers = [each for each in told if not isinstance(each, ApiError)]
    if not answers:
        raise told[0] if told else unavailable("no replica is ready", 1)
    return answers
