"""An ingress in a replica of Ray Serve, behind Ray's HTTP proxy: there may be several, and Ray replaces one that dies.

Each has a mirror and a book of its own. What it shows of the fleet is what all of them know; its metrics are its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from blockyard.errors import MissingExtra
from blockyard_engine.model import load_tokenizer

from ..http.server import guarded
from .app import Fleetwork, Front, IngressPlan
from .replica import listen_on_loopback

try:
    from ray import serve
except ImportError as error:
    raise MissingExtra(f"a fleet needs {error.name}: pip install 'blockyard[fleet,serve]'") from error

#: Seconds that a look at the other ingresses may take.
_LOOK_SECONDS = 30.0


@serve.ingress()
class Ingress:
    """Is an application of `app` as Ray Serve makes it."""

    async def __init__(self, engines: Any, plan: IngressPlan) -> None:  # type: ignore[misc]
        if plan.is_local:
            listen_on_loopback()
        context = serve.get_replica_context()
        self._others = serve.get_deployment_handle(context.deployment, context.app_name)
        self._name = context.replica_id.unique_id
        model = await engines.model.remote()
        self._options = plan.options
        self._front = Front(
            Fleetwork(
                engines,
                model,
                load_tokenizer(Path(plan.folder)),
                plan.num_replicas,
                plan.cost,
                plan.silence,
                plan.endurance,
                name=f"fleet-{self._name}",
            ),
            plan.options,
            self._ask_all,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return guarded(self._front.app, self._options)

    async def look(self, what: str) -> tuple[str, dict[str, Any]]:
        """Return this one's name, and what it knows (`Front.look`)."""
        return self._name, await self._front.look(what)

    async def _ask_all(self, what: str) -> list[dict[str, Any]]:
        try:
            told = await self._others.broadcast("look", what).results_async(timeout_s=_LOOK_SECONDS)
        except Exception as error:  # one has just died, or this one is not known yet
            if what != "state":
                return [{"ok": False, "error": f"an ingress does not answer: {error}"[:500]}]
            told = []
        looks = dict(told)
        own = looks.pop(self._name, None) or await self._front.look(what)
        return [own, *looks.values()]
