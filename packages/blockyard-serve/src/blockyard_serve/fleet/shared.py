"""The fleets of a process by name, shared by its routers: Ray makes one router for each handle of a deployment."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockyard.errors import InvalidArgument
from blockyard.routing import Addresses, Choice, Fleet, ReplicaStatus, Shares, make_cost


class SharedFleet:
    """A `Fleet` with a lock, for routers and an ingress in several threads. Methods do what `Fleet`'s do.

    Args:
        cost: name of the router's cost.
        heartbeat_timeout: seconds without a message after which a replica is not trusted.
    """

    def __init__(self, cost: str, heartbeat_timeout: float) -> None:
        self._lock = threading.Lock()
        self._made_of = cost, heartbeat_timeout
        self.fleet = Fleet(make_cost(cost), heartbeat_timeout=heartbeat_timeout)
        #: Replicas that prefill for the others.
        self.prefills: frozenset[str] = frozenset()

    def reconfigure(self, cost: str | None, heartbeat_timeout: float | None) -> None:
        """Change cost and heartbeat timeout; None keeps the current value.

        Raises `InvalidArgument` if they differ and the fleet already has replicas.
        """
        with self._lock:
            old_cost, old_timeout = self._made_of
            wanted = old_cost if cost is None else cost, old_timeout if heartbeat_timeout is None else heartbeat_timeout
            if wanted == self._made_of:
                return
            if self.fleet.router.replicas:
                raise InvalidArgument(
                    f"cost and heartbeat_timeout are {wanted}; the fleet already has replicas with {self._made_of}"
                )
            made = Fleet(make_cost(wanted[0]), heartbeat_timeout=wanted[1], shares=self.fleet.router.shares)
            self.fleet.close()
            self.fleet, self._made_of = made, wanted

    def share(self, shares: Shares | None) -> None:
        """Set the quotas of tenants that share the replicas' pools; None for no tenants."""
        with self._lock:
            self.fleet.router.shares = shares

    def sync(self, replicas: Mapping[str, Addresses], prefills: Iterable[str] = ()) -> None:
        """Set the replicas and those among them that prefill for others."""
        with self._lock:
            self.fleet.sync(replicas)
            self.prefills = frozenset(prefills)

    def others(self) -> tuple[str, ...]:
        """Return the replicas that are not in `prefills`."""
        with self._lock:
            return tuple(name for name in self.fleet.router.replicas if name not in self.prefills)

    def drop(self, replica: str) -> None:
        with self._lock:
            self.fleet.drop(replica)

    def choose(self, request: str, token_ids: Any, allowed: Sequence[str], **more: Any) -> Choice:
        with self._lock:
            return self.fleet.choose(request, token_ids, allowed=allowed, **more)

    def reassign(self, request: str, replica: str) -> None:
        with self._lock:
            self.fleet.reassign(request, replica)

    def record_first_token(self, request: str) -> None:
        """Record that a request's prompt is computed. Only the ingress knows it."""
        with self._lock:
            self.fleet.record_first_token(request)

    def finish(self, request: str, replica: str | None = None) -> None:
        with self._lock:
            self.fleet.finish(request, replica)

    def poll(self) -> None:
        with self._lock:
            self.fleet.poll()

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.fleet.router.load.rows)

    def status(self) -> list[ReplicaStatus]:
        with self._lock:
            return self.fleet.status()

    def hits(self, prompts: Sequence[Any], extra_keys: Any = ()) -> list[dict[str, int]]:
        """Return, for each prompt, how many leading tokens each replica has, without replicas that have none."""
        with self._lock:
            self.fleet.poll()
            return [self.fleet.hits(prompt, extra_keys) for prompt in prompts]

    def check(self) -> None:
        """Raise `AssertionError` unless the bookings match the requests in flight."""
        with self._lock:
            self.fleet.check()


_FLEETS: dict[str, SharedFleet] = {}
_MAKING = threading.Lock()


def shared_fleet(name: str, cost: str | None = None, heartbeat_timeout: float | None = None) -> SharedFleet:
    """Return this process's fleet of a name, and create it on the first call.

    Args:
        name: name of the fleet.
        cost: name of the router's cost; by default "robust".
        heartbeat_timeout: seconds without a message after which a replica is not trusted; by default 3.

    Raises:
        InvalidArgument: like `Fleet`, or if a fleet with replicas has another cost or heartbeat timeout.
    """
    with _MAKING:
        if name not in _FLEETS:
            made = "robust" if cost is None else cost, 3.0 if heartbeat_timeout is None else heartbeat_timeout
            _FLEETS[name] = SharedFleet(*made)
        _FLEETS[name].reconfigure(cost, heartbeat_timeout)
        return _FLEETS[name]
