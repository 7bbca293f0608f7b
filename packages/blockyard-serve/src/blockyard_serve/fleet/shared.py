"""Fleets of a process by name are shared here by its routers: Ray makes one router for each handle of a deployment."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from blockyard.errors import InvalidArgument
from blockyard.routing import Addresses, Choice, Fleet, ReplicaStatus, Shares, make_cost


class SharedFleet:
    """Is a fleet behind a lock, for routers and an ingress on several threads; each call does what `Fleet`'s does."""

    def __init__(self, cost: str, silence: float) -> None:
        self._lock = threading.Lock()
        self._made_of = cost, silence
        self.fleet = Fleet(make_cost(cost), heartbeat_timeout=silence)
        #: Replicas that compute prompts for the others.
        self.prefills: frozenset[str] = frozenset()

    def become(self, cost: str | None, silence: float | None) -> None:
        """Takes another cost, or silence; None leaves it. Raises `InvalidArgument` once there are replicas."""
        with self._lock:
            old_cost, old_silence = self._made_of
            wanted = old_cost if cost is None else cost, old_silence if silence is None else silence
            if wanted == self._made_of:
                return
            if self.fleet.router.replicas:
                raise InvalidArgument(
                    f"cost and silence are {wanted}; those of this fleet's replicas are {self._made_of}"
                )
            made = Fleet(make_cost(wanted[0]), heartbeat_timeout=wanted[1], shares=self.fleet.router.shares)
            self.fleet.close()
            self.fleet, self._made_of = made, wanted

    def share(self, shares: Shares | None) -> None:
        """Have choices take account of tenants who share the replicas' pools; None where there are none."""
        with self._lock:
            self.fleet.router.shares = shares

    def sync(self, replicas: Mapping[str, Addresses], prefills: Iterable[str] = ()) -> None:
        """Make these all that are there; some compute prompts for the others."""
        with self._lock:
            self.fleet.sync(replicas)
            self.prefills = frozenset(prefills)

    def others(self) -> tuple[str, ...]:
        """Return the replicas that are not among `prefills`."""
        with self._lock:
            return tuple(name for name in self.fleet.router.replicas if name not in self.prefills)

    def drop(self, replica: str) -> None:
        """Forget a replica that is gone."""
        with self._lock:
            self.fleet.drop(replica)

    def choose(self, request: str, token_ids: Any, among: Sequence[str], **more: Any) -> Choice:
        """Choose a replica and book the request there."""
        with self._lock:
            return self.fleet.choose(request, token_ids, allowed=among, **more)

    def moved(self, request: str, replica: str) -> None:
        """Take note that another replica has a request."""
        with self._lock:
            self.fleet.reassign(request, replica)

    def first_token(self, request: str) -> None:
        """Take note that a request's prompt is computed: only the ingress knows, and says so."""
        with self._lock:
            self.fleet.record_first_token(request)

    def done(self, request: str, replica: str | None = None) -> None:
        """Free a request."""
        with self._lock:
            self.fleet.finish(request, replica)

    def poll(self) -> None:
        """Read what has arrived."""
        with self._lock:
            self.fleet.poll()

    @property
    def num_replicas(self) -> int:
        """Return how many replicas there are."""
        return len(self.fleet.router.load.rows)

    def status(self) -> list[ReplicaStatus]:
        """Return what is known of each replica."""
        with self._lock:
            return self.fleet.status()

    def hits(self, prompts: Sequence[Any], extra_keys: Any = ()) -> list[dict[str, int]]:
        """Return for each prompt how many leading tokens each replica can give, of those that have any."""
        with self._lock:
            self.fleet.poll()
            return [self.fleet.hits(prompt, extra_keys) for prompt in prompts]

    def check(self) -> None:
        """Raise `AssertionError` unless the book is that of the requests in flight."""
        with self._lock:
            self.fleet.check()


_FLEETS: dict[str, SharedFleet] = {}
_MAKING = threading.Lock()


def shared_fleet(name: str, cost: str | None = None, silence: float | None = None) -> SharedFleet:
    """Return this process's fleet of a name, which the first call makes: by `robust` and 3 seconds where it says none.

    Raises as `Fleet`, and `InvalidArgument` where a fleet that has replicas is asked for under another cost or silence.
    """
    with _MAKING:
        if name not in _FLEETS:
            made = "robust" if cost is None else cost, 3.0 if silence is None else silence
            _FLEETS[name] = SharedFleet(*made)
        _FLEETS[name].become(cost, silence)
        return _FLEETS[name]
