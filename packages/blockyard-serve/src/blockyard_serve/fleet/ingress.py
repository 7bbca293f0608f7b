"""An ingress in a replica of Ray Serve, reached through Ray's HTTP proxy. Ray replaces it if it dies.

Each ingress has its own mirror of the replicas and its own bookings. GET /fleet merges the views of all ingresses;
metrics are those of the ingress that answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from blockyard.errors import MissingExtra
from blockyard_engine.model import load_tokenizer

from ..http.server import wrap_app
from .app import FleetBackend, IngressApp, IngressPlan
from .replica import listen_on_loopback

try:
    from ray import serve
except ImportError as error:
    raise MissingExtra(f"a fleet needs {error.name}: pip install 'blockyard[fleet,serve]'") from error

#: Timeout of a call of all ingresses.
_CALL_SECONDS = 30.0


@serve.ingress()
class Ingress:
    """A Ray Serve deployment of an `IngressApp`."""

    async def __init__(self, engines: Any, plan: IngressPlan) -> None:  # type: ignore[misc]
        if plan.is_local:
            listen_on_loopback()
        context = serve.get_replica_context()
        self._others = serve.get_deployment_handle(context.deployment, context.app_name)
        self._name = context.replica_id.unique_id
        model = await engines.model.remote()
        self._options = plan.options
        self._app = IngressApp(
            FleetBackend(
                engines,
                model,
                load_tokenizer(Path(plan.folder)),
                plan.num_replicas,
                plan.policy,
                name=f"fleet-{self._name}",
            ),
            plan.options,
            self._view_all,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return wrap_app(self._app.app, self._options)

    async def view(self, what: str) -> tuple[str, dict[str, Any]]:
        """Return this ingress's name and view of the fleet (`IngressApp.view`)."""
        return self._name, await self._app.view(what)

    async def _view_all(self, what: str) -> list[dict[str, Any]]:
        try:
            found = await self._others.broadcast("view", what).results_async(timeout_s=_CALL_SECONDS)
        except Exception as error:  # one has just died, or Ray does not know this one yet
            if what != "state":
                return [{"ok": False, "error": f"an ingress does not answer: {error}"[:500]}]
            found = []
        views = dict(found)
        own = views.pop(self._name, None) or await self._app.view(what)
        return [own, *views.values()]
