"""`ExactRouter`: `Fleet` as a request router of Ray Serve. Ray's interface is alpha, so version 2.60 is pinned.

    RequestRouterConfig(request_router_class="blockyard_serve.fleet.ray_serve.ExactRouter",
                        request_router_kwargs={"cost": "robust", "heartbeat_timeout": 3.0})

A replica publishes the endpoints of its events with `record_replica_metadata`: {"kv": [endpoint, replay_endpoint]},
and {"prefill": True} if it prefills for others (`SharedFleet.prefills`). The request is the first argument that has
`token_ids`. It may also have `max_tokens`, `session`, `extra_keys`; `avoid`, names of replicas to use only if there
is no other; `on_choice`, called with the request's number and the `Choice`; `on_reassigned`, called with the name
of the replica that took it. Ray pickles this module by value, so its state is in `shared`.
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

#: Seconds between two reads of events.
READ_SECONDS = 0.02


class ExactRouter(RequestRouter):  # type: ignore[misc]
    """Sends each request to the replica that `Fleet` chooses. A choice never raises: Ray would hang the request."""

    def initialize_state(self, cost: str = "robust", heartbeat_timeout: float = 3.0) -> None:
        """Set the arguments of `request_router_kwargs`. Raises `InvalidArgument` if one is invalid."""
        self._shared = shared_fleet(str(self._deployment_id), cost, heartbeat_timeout)
        self._timer: Any = None

    def update_replicas(self, replicas: list[Any]) -> None:
        """Follow new replicas and drop removed ones."""
        super().update_replicas(replicas)
        metadata = {each.replica_id.unique_id: each.replica_metadata or {} for each in replicas}
        prefills = [name for name, each in metadata.items() if each.get("prefill")]
        addresses = {name: tuple(each["kv"]) if each.get("kv") else None for name, each in metadata.items()}
        self._shared.sync(addresses, prefills)
        if self._timer is None:
            self._read()

    def _read(self) -> None:
        """Read events periodically while there are replicas; Ray does not tell a router when it ends."""
        self._shared.poll()
        self._timer = self._event_loop.call_later(READ_SECONDS, self._read) if self._replicas else None

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Drop a replica that died. Called once for each of its requests."""
        super().on_replica_actor_died(replica_id)
        self._shared.drop(replica_id.unique_id)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return one candidate per rank, the best first; all in one rank if there is no request."""
        if pending_request is None:
            return [candidate_replicas]
        try:
            pending_request.routing_context.should_backoff = (
                True  # otherwise Ray retries without a pause when all are full
            )
            return self._ranked(candidate_replicas, pending_request)
        except Exception:
            _log.exception("choosing a replica failed; any replica may take the request")
            return [candidate_replicas]

    def _ranked(self, candidates: list[Any], pending: Any) -> list[list[Any]]:
        by_name = {each.replica_id.unique_id: each for each in candidates}
        request = _request_of(pending)
        avoided = getattr(request, "avoid", ())
        names = [name for name in by_name if name not in avoided] or list(by_name)
        fields = ("max_tokens", "session", "extra_keys")
        more = {name: getattr(request, name) for name in fields if getattr(request, name, None) is not None}
        number = pending.metadata.internal_request_id
        choice = self._shared.choose(number, getattr(request, "token_ids", ()), names, **more)
        _notify(request, "on_choice", number, choice)
        # Ray does not report a request that is cancelled while it waits.
        shared = self._shared
        pending.future.add_done_callback(lambda future: shared.finish(number) if future.cancelled() else None)
        return [[by_name[name]] for name in choice.order] or [candidates]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:  # noqa: ARG002
        """Book the request at the replica that took it: the first choice may have been full."""
        self._shared.reassign(pending_request.metadata.internal_request_id, replica_id.unique_id)
        _notify(_request_of(pending_request), "on_reassigned", replica_id.unique_id)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Finish the request, unless another replica has it now: a refused attempt may be reported late."""
        self._shared.finish(internal_request_id, replica_id.unique_id)


def _request_of(pending: Any) -> Any:
    return next((each for each in (*pending.args, *pending.kwargs.values()) if hasattr(each, "token_ids")), None)


def _notify(request: Any, name: str, *arguments: Any) -> None:
    callback = getattr(request, name, None)
    if callback is not None:
        callback(*arguments)
