"""The application before a fleet has the paths of a server of one engine, and those that show the fleet."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from ...arguments import require_unicode
from ...fleet.shared import SharedFleet, shared_fleet
from ...live.page import fleet_page
from ..http.access import KeyGuard
from ..http.app import HttpFigures, app_of
from ..http.live_routes import lead_to_page
from ..http.server import ServerOptions
from ..http.service import Service
from ..jobs.planner import Planner
from ..jobs.prompts import PromptEncoder
from ..jobs.request_figures import RequestFigures
from ..jobs.served_model import ServedModel
from ..openai.responses import TokenTexts
from .asks import ReplicaAsk
from .dispatcher import Dispatcher, Endurance
from .figures import FleetCollector, FleetFigures, FleetPage

#: Seconds that a look at all replicas may take, and prompts that are compared.
_LOOK_SECONDS, _MAX_PROMPTS = 20.0, 64


@dataclass(frozen=True, slots=True)
class Fleetwork:
    """This stands behind the address. handle: Ray Serve's. model: of all replicas. cost, silence: of the router."""

    handle: Any
    model: ServedModel
    tokenizer: Any
    num_replicas: int
    cost: str = "robust"
    silence: float = 3.0
    endurance: Endurance = field(default_factory=Endurance)


def create_fleet_app(work: Fleetwork, options: ServerOptions) -> FastAPI:
    """Return the application, which runs in this process. Raises `InvalidArgument` as `create_app`.

    options: those of a server that speak of its engine count for nothing.
    """
    require_unicode("model_name", options.model_name)
    limits, model = options.limits, work.model
    labels = {"engine": "fleet", "model_name": options.model_name}
    figures, requests = FleetFigures(), RequestFigures(labels, model.max_model_len)
    fleet = shared_fleet(str(work.handle.deployment_id), work.cost, work.silence)
    generate = work.handle.options(stream=True, method_name="generate")
    recent: deque[NDArray[np.int32]] = deque(maxlen=_MAX_PROMPTS)

    def send(ask: ReplicaAsk) -> Any:
        if options.has_check and not ask.extra_keys:
            recent.append(ask.token_ids[: ask.num_prompt])
        return generate.remote(ask)

    capacity = work.num_replicas * model.max_num_seqs + limits.max_waiting
    dispatcher = Dispatcher(send, fleet, figures, requests, capacity, work.endurance, limits.retry_after_seconds)
    encoder = PromptEncoder(work.tokenizer, model.vocab_size)
    planner = Planner(model, encoder, limits, capacity)
    service = Service(dispatcher, planner, TokenTexts(work.tokenizer), limits, options.model_name, int(time.time()))
    guard, http = KeyGuard(options.api_key), HttpFigures()
    page = FleetPage([http, requests, FleetCollector(fleet, figures, labels)])
    app = app_of(service, encoder, model.hash_block_size, guard, http, page, options.cors_origins, True)
    app.include_router(fleet_routes(fleet, figures, guard, options.model_name))
    lead_to_page(app, fleet_page())
    if options.has_check:
        app.include_router(check_routes(work.handle, fleet, recent, guard))
    return app


def fleet_routes(fleet: SharedFleet, figures: FleetFigures, guard: KeyGuard, model_name: str) -> APIRouter:
    """GET /fleet, behind the key."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.get("/fleet")
    async def show() -> dict[str, Any]:
        """Return the replicas, what became of claims, and the last choices with their why."""
        replicas = [{**each._asdict(), "lost": figures.num_lost[each.name]} for each in fleet.status()]
        return {
            "object": "fleet",
            "model": model_name,
            "replicas": replicas,
            "claims": {name: asdict(claims) for name, claims in figures.claims.items()},
            "lost_attempts": figures.num_lost.total(),
            "resumed_requests": figures.num_resumed,
            "resumed_tokens": figures.num_tokens_resumed,
            "choices": figures.shown_choices(),
        }

    return router


def check_routes(handle: Any, fleet: SharedFleet, recent: deque[NDArray[np.int32]], guard: KeyGuard) -> APIRouter:
    """GET /check, behind the key: the router's knowledge and book against the truth. For tests."""
    router = APIRouter(dependencies=[Depends(guard)])

    @router.get("/check", response_model=None)
    async def check() -> Response:
        """Ask all replicas what they hold of the last prompts; wait for a moment at which the mirror says the same."""
        prompts = list(recent)
        answer: dict[str, Any] = {}
        for _ in range(10):  # events are on their way for some milliseconds
            try:
                answer = await _compared(handle, fleet, prompts)
            except Exception as error:  # a replica that has just died, say
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
            if answer["ok"]:
                break
            await asyncio.sleep(0.2)
        return JSONResponse(answer, 200 if answer["ok"] else 500)

    return router


async def _compared(handle: Any, fleet: SharedFleet, prompts: list[NDArray[np.int32]]) -> dict[str, Any]:
    # One token more: a cache says of a whole prompt what can be used of it, and the last token is computed anyway.
    longer = [np.append(prompt, prompt[-1]) for prompt in prompts]
    told = await handle.broadcast("inspect", longer).results_async(timeout_s=_LOOK_SECONDS)
    claims = fleet.hits(longer)
    fleet.check()
    differences = [
        {"replica": name, "prompt": number, "held": held[number], "mirror": claim.get(name, 0)}
        for name, _, held, _ in told
        for number, claim in enumerate(claims)
        if held[number] != claim.get(name, 0)
    ]
    problems = {name: problem for name, _, _, problem in told if problem}
    booked = sum(each.requests for each in fleet.status())
    return {
        "ok": not differences and not problems,
        "replicas": {name: process for name, process, _, _ in told},
        "compared": len(told) * len(prompts),
        "differences": differences[:20],
        "problems": problems,
        "booked": booked,
    }
