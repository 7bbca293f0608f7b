"""`Fleet`: a router that follows the contents of replicas by their KV events."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..arguments import require_int, require_number, shown
from ..core.tokens import integer_array
from ..errors import BlockyardError, InvalidArgument
from ..events import Matches, Mirror, Subscriber, Trust
from ..keys import canonical_keys
from .cost import Bools, Cost, Ints, RouteRequest
from .costs.robust import Robust
from .load import HELD, REQUESTS, UNCACHED, is_name
from .prefixes import Links
from .router import Choice, Router
from .shares import Shares

_log = logging.getLogger(__name__)

#: Tokens per link, the granularity in which prompts in flight are compared.
LINK_TOKENS = 128
MAX_TOKENS = 2**31 - 1
#: A choice polls for events if the last poll was more than `FRESH` seconds ago. If polling takes long, the interval is
#: `TIMES` times its duration, at most `MOST_FRESH`, so that at most a fifth of the time is spent on it.
FRESH, TIMES, MOST_FRESH = 0.005, 4, 0.05


class ReplicaStatus(NamedTuple):
    """State of a replica.

    Attributes:
        name: name of the replica.
        is_believed: whether its events are complete and recent.
        trust: value of its `Trust`, "none" if it publishes no events.
        silence: seconds since its last message, None if it publishes no events.
        requests: requests in flight.
        uncached: prompt tokens that they have to compute.
        held: tokens of their prompts and longest answers.
    """

    name: str
    is_believed: bool
    trust: str
    silence: float | None
    requests: int
    uncached: int
    held: int


#: Endpoints of a replica's events and of their replay; None for a replica that publishes none.
Addresses = tuple[str, str] | None


class Fleet:
    """Chooses a replica for each request by the KV events of all replicas and their load.

        fleet = Fleet()
        fleet.follow("engine-0", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
        choice = fleet.choose("request-1", token_ids, max_tokens=256)
        ...send it to choice.replica...; fleet.record_first_token("request-1") when it arrives
        fleet.finish("request-1")     completed, failed or cancelled

    A replica is trusted while none of its events is missing (`Trust.LIVE`) and its last message is less than
    `heartbeat_timeout` seconds old. Other replicas get requests by load only, and their hits do not count. A replica
    that timed out gets one request at a time, and only if no other can take it. `choose`, `record_first_token`,
    `reassign`, `finish` and `drop` never raise and never wait. Not thread-safe. Needs the extra `events`.

    Args:
        cost: cost function (`blockyard.routing.costs.COSTS`); `Robust` by default.
        heartbeat_timeout: seconds without a message after which a replica is not trusted; above 0.
        clock: clock in seconds.
        shares: shares of the tenants if they share the replicas' pools. A request then goes where its tenant, given by
            its extra keys, is within its guarantee or its share.
    """

    def __init__(
        self,
        cost: Cost | None = None,
        *,
        heartbeat_timeout: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
        shares: Shares | None = None,
    ) -> None:
        self._heartbeat_timeout = require_number("heartbeat_timeout", heartbeat_timeout)
        if self._heartbeat_timeout <= 0:
            raise InvalidArgument(f"heartbeat_timeout is {heartbeat_timeout}; it must be above 0 seconds")
        self.router = Router(Robust() if cost is None else cost, shares)
        self.mirror = Mirror()
        self._subscriber = Subscriber(self.mirror)
        self._clock = clock
        self._followed: set[str] = set()
        #: Time from which on a choice polls for events again.
        self._old_at = -np.inf
        #: By row of the router; None if replicas have changed since the last poll.
        self._is_believed: Bools | None = None
        self._silent: list[str] = []
        #: Workers of the mirror's last match, and the router's row of each, -1 for none.
        self._workers: tuple[str, ...] = ()
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)

    # Replicas.

    def follow(self, replica: str, endpoint: str | None = None, replay_endpoint: str = "", topic: str = "") -> None:
        """Add a replica and subscribe to its events. Without an endpoint it publishes none.

        Args:
            replica: name of the replica.
            endpoint: ZeroMQ endpoint of its events.
            replay_endpoint: endpoint of their replay.
            topic: topic to subscribe to.

        Raises:
            InvalidArgument: the name exists, or an endpoint is malformed.
            PublisherError: the fleet is closed.
        """
        if replica in self.router.load.rows:
            raise InvalidArgument(f"replica is {shown(replica)}; a replica of this name exists")
        if endpoint is not None:
            self._subscriber.follow(replica, endpoint, replay_endpoint, topic)
            self._followed.add(replica)
        self.router.add(replica)
        self._changed()

    def drop(self, replica: str) -> list[str]:
        """Remove a replica; return the names of its requests. An unknown replica has none."""
        if is_name(replica) and replica in self._followed:
            self._followed.discard(replica)
            self._subscriber.unfollow(replica)
        self._changed()
        return self.router.drop(replica)

    def sync(self, replicas: Mapping[str, Addresses]) -> None:
        """Remove the replicas that are not in `replicas`, and follow the new ones.

        If an address is malformed, it is logged and the replica is not subscribed to.
        """
        for name in [name for name in self.router.load.rows if name not in replicas]:
            self.drop(name)
        for name, addresses in replicas.items():
            if name not in self.router.load.rows:
                try:
                    self.follow(name, *(addresses or ()))
                except (BlockyardError, TypeError):
                    _log.exception("replica %s cannot be followed; it gets requests by load only", shown(name))
                    self.follow(name)

    def _changed(self) -> None:
        self._is_believed, self._workers = None, ()

    # Requests.

    def choose(
        self,
        request: str,
        token_ids: Any,
        *,
        max_tokens: int = 0,
        session: str = "",
        extra_keys: Any = (),
        allowed: Sequence[str] | None = None,
    ) -> Choice:
        """Choose a replica and assign the request to it, removing an earlier assignment. O(blocks found + replicas).

        If tokens or keys are invalid, only load decides and `Choice.problem` says why. If `request` has no hash or
        `allowed` is not a list of names, no replica is chosen.

        Args:
            request: id of the request.
            token_ids: integers (n,), fastest as int32.
            max_tokens: most tokens of the answer.
            session: name of the conversation.
            extra_keys: extra keys of the request.
            allowed: names of the replicas that may take it; None for all.
        """
        now = self._clock()
        if now >= self._old_at or self._is_believed is None:
            self.poll()
        assert self._is_believed is not None
        num_replicas = len(self._is_believed)
        hits = gpu_hits = np.zeros(num_replicas, np.int64)
        routed, problem = RouteRequest(request, 0, now=now), ""
        try:
            tokens, keys = _as_int32(token_ids), canonical_keys(extra_keys)
            num_more = require_int("max_tokens", max_tokens, 0, MAX_TOKENS)
            shares = self.router.shares
            tenant = -1 if shares is None else shares.tenant_of(keys)
            routed = RouteRequest(
                request, len(tokens), num_more, session, links_of(tokens, keys), LINK_TOKENS, now, tenant
            )
            hits, gpu_hits = self._hits(tokens, keys)
        except Exception as error:
            problem = f"load alone decided: {error!r}"
        sums, rows = self.router.load.sums, self.router.load.rows
        avoid = [name for name in self._silent if sums[REQUESTS, rows[name]] > 0]
        choice = self.router.choose(routed, hits, gpu_hits, self._is_believed, allowed, avoid)
        choice.problem = choice.problem or problem
        return choice

    def _match(self, tokens: NDArray[np.int32], keys: Any) -> Matches:
        """Match all tokens but the last one, which is always computed."""
        return self.mirror.match(tokens, keys, num_tokens=max(len(tokens) - 1, 0))

    def _hits(self, tokens: NDArray[np.int32], keys: Any) -> tuple[Ints, Ints]:
        found = self._match(tokens, keys)
        workers = found.workers
        if workers != self._workers:
            rows = self.router.load.rows
            self._workers, self._rows = workers, np.array([rows.get(name, -1) for name in workers], np.int64)
        # One column more for workers that are no replicas.
        hits: Ints = np.zeros((2, len(self.router.load.rows) + 1), np.int64)
        hits[0, self._rows], hits[1, self._rows] = found.num_tokens, found.num_gpu_tokens
        return hits[0, :-1], hits[1, :-1]

    def record_first_token(self, request: str) -> None:
        """Record that a request's prompt is computed. A second call, or an unknown name, changes nothing."""
        self.router.record_first_token(request, self._clock())

    def reassign(self, request: str, replica: str) -> None:
        """Record that another replica than the chosen one got a request. Unknown names change nothing."""
        self.router.reassign(request, replica)

    def finish(self, request: str, replica: str | None = None) -> None:
        """Remove a request that completed, failed, or was rejected or cancelled; with `replica`, only from there."""
        self.router.finish(request, replica, self._clock())

    # State.

    def poll(self) -> int:
        """Read the messages that have arrived, without waiting, and update which replicas are trusted.

        Call it often. `choose` polls if the last poll was more than 5 ms ago, or four times its duration, at most 50
        ms. Returns the number of messages. O(messages + replicas).
        """
        began = self._clock()
        try:
            count = self._subscriber.poll(0.0)
        except Exception:
            _log.exception("events cannot be read; the contents of replicas get out of date")
            count = 0
        believed = []
        self._silent = []
        for name in self.router.load.rows:
            is_silent = (
                name in self._followed and self._subscriber.seconds_since_message(name) >= self._heartbeat_timeout
            )
            if is_silent:
                self._silent.append(name)
            believed.append(name in self._followed and not is_silent and self.mirror.trust(name) is Trust.LIVE)
        self._is_believed = np.array(believed, np.bool_)
        now = self._clock()
        self._old_at = now + min(max(TIMES * (now - began), FRESH), MOST_FRESH)
        return count

    def is_trusted(self, replica: str) -> bool:
        """Return whether a replica was trusted at the last poll, so that its hits count.

        False for an unknown replica.
        """
        row = self.router.load.rows.get(replica) if is_name(replica) else None
        return row is not None and self._is_believed is not None and bool(self._is_believed[row])

    def status(self) -> list[ReplicaStatus]:
        """Return the state of each replica at the last poll. O(replicas)."""
        found, sums = [], self.router.load.sums
        for name, row in self.router.load.rows.items():
            is_followed = name in self._followed
            trust = self.mirror.trust(name).value if is_followed else "none"
            silence = self._subscriber.seconds_since_message(name) if is_followed else None
            load = (int(sums[REQUESTS, row]), int(sums[UNCACHED, row]), int(sums[HELD, row]))
            found.append(ReplicaStatus(name, self.is_trusted(name), trust, silence, *load))
        return found

    def hits(self, token_ids: Any, extra_keys: Any = ()) -> dict[str, int]:
        """Return how many leading tokens of a prompt each replica holds, trusted or not. O(blocks).

        The last token is never counted, as in `KVCacheManager.num_cached_tokens`. Raises `InvalidArgument` for bad
        tokens or keys.
        """
        found = self._match(_as_int32(token_ids), extra_keys)
        return {name: match.num_tokens for name, match in found.items()}

    def check(self) -> None:
        """Raise `AssertionError` unless load and prompts in flight equal those of the assigned requests."""
        self.router.check()
        assert self._followed <= self.router.load.rows.keys()

    def close(self) -> None:
        """Close the sockets. A second call does nothing."""
        self._subscriber.close()
        self._followed.clear()
        self._changed()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()


def _as_int32(token_ids: Any) -> NDArray[np.int32]:
    tokens = integer_array("token_ids", token_ids)
    if tokens.dtype != np.int32 and len(tokens) and not 0 <= tokens.min() <= tokens.max() <= MAX_TOKENS:
        raise InvalidArgument(
            f"token_ids has values from {tokens.min()} to {tokens.max()}; they must be from 0 to {MAX_TOKENS}"
        )
    return np.asarray(tokens, np.int32)


def links_of(tokens: NDArray[np.int32], keys: Any = ()) -> Links:
    """Return a link for each `LINK_TOKENS` tokens: a key of all tokens up to its end and the extra keys. O(tokens)."""
    data, size = tokens.tobytes(), 4 * LINK_TOKENS
    link, links = hash(repr(keys)) if keys else 0, []
    for start in range(0, len(data) - size + 1, size):
        link = hash((link, data[start : start + size]))
        links.append(link)
    return links
