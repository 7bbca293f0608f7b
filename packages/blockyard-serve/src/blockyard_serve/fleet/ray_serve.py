"""`ExactRouter` is `Fleet` as a request router of Ray Serve (extra `fleet`; its surface is alpha, so 2.60 is pinned).

    RequestRouterConfig(request_router_class="blockyard_serve.fleet.ray_serve.ExactRouter",
                        request_router_kwargs={"cost": "robust", "silence": 3.0})

A replica says where its events are: `record_replica_metadata` returns {"kv": [endpoint, replay_endpoint]}, and
{"prefill": True} where it computes prompts for the others (`SharedFleet.prefills`). A request is the first argument
that has `token_ids`, and perhaps `max_tokens`, `session` and `extra_keys`; `avoid`, names of replicas that are not to
have it while there are others; `on_choice`, told the number under which it is booked and the `Choice`; `on_moved`, told
the name of the replica that took it. Ray pickles this module by value, so it keeps nothing; the state is in `shared`.
"""

from __future__ import annotations

import logging
from typing import Any

from blockyard.errors import MissingExtra

from .shared import shared_fleet

try:
    from ray.serve.request_router import RequestRouter
except ImportError as error:
    raise MissingExtra(f"ExactRouter needs {error.name}: pip install 'blockyard[fleet]'") from error

_log = logging.getLogger(__name__)

#: Seconds from one reading of events to the next.
EVERY = 0.02


class ExactRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request where `Fleet` says. A choice never raises: Ray would let the request wait forever."""

    def initialize_state(self, cost: str = "robust", silence: float = 3.0) -> None:
        """Take the arguments of `request_router_kwargs`. Raises `InvalidArgument` for those that cannot be."""
        self._shared = shared_fleet(str(self._deployment_id), cost, silence)
        self._timer: Any = None

    def update_replicas(self, replicas: list[Any]) -> None:
        """Follow those that are new and drop those that are gone."""
        super().update_replicas(replicas)
        metadata = {each.replica_id.unique_id: each.replica_metadata or {} for each in replicas}
        prefills = [name for name, told in metadata.items() if told.get("prefill")]
        self._shared.sync({name: _addresses(told) for name, told in metadata.items()}, prefills)
        if self._timer is None:
            self._read()

    def _read(self) -> None:
        """Read events now and again, while there are replicas: Ray has no call for the end."""
        self._shared.poll()
        self._timer = self._event_loop.call_later(EVERY, self._read) if self._replicas else None

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Drop a replica that died. It comes once for each request in flight."""
        super().on_replica_actor_died(replica_id)
        self._shared.drop(replica_id.unique_id)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return one candidate a rank, the best first; all in one rank where there is no request."""
        if pending_request is None:
            return [candidate_replicas]
        try:
            pending_request.routing_context.should_backoff = True  # else there is no pause when all are full
            return self._ranked(candidate_replicas, pending_request)
        except Exception:
            _log.exception("no choice was made; any replica takes the request")
            return [candidate_replicas]

    def _ranked(self, candidates: list[Any], pending: Any) -> list[list[Any]]:
        by_name = {each.replica_id.unique_id: each for each in candidates}
        asked = _asked(pending)
        avoided = getattr(asked, "avoid", ())
        names = [name for name in by_name if name not in avoided] or list(by_name)
        fields = ("max_tokens", "session", "extra_keys")
        more = {name: getattr(asked, name) for name in fields if getattr(asked, name, None) is not None}
        number = pending.metadata.internal_request_id
        choice = self._shared.choose(number, getattr(asked, "token_ids", ()), names, **more)
        _tell(asked, "on_choice", number, choice)
        # One that is cancelled while it waits gives no other notice.
        shared = self._shared
        pending.future.add_done_callback(lambda future: shared.done(number) if future.cancelled() else None)
        return [[by_name[name]] for name in choice.order] or [candidates]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:  # noqa: ARG002
        """Book the request where it went: the first choice may have been full."""
        self._shared.moved(pending_request.metadata.internal_request_id, replica_id.unique_id)
        _tell(_asked(pending_request), "on_moved", replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Free the request, unless another replica has it by now: a refused attempt is told late."""
        self._shared.done(internal_request_id, replica_id.unique_id)


def _asked(pending: Any) -> Any:
    return next((each for each in (*pending.args, *pending.kwargs.values()) if hasattr(each, "token_ids")), None)


def _tell(asked: Any, name: str, *what: Any) -> None:
    told = getattr(asked, name, None)
    if told is not None:
        told(*what)


def _addresses(metadata: dict[str, Any]) -> tuple[str, str] | None:
    found = metadata.get("kv")
    return None if found is None else (found[0], found[1])
