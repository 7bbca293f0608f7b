"""A fleet is what a gateway sees: what each replica holds, by its KV events, and a router over them."""

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
from .asking import Ask, Bools, Cost, Ints
from .book import HELD, REQUESTS, UNCACHED, is_name
from .costs.robust import Robust
from .prefixes import Links
from .router import Choice, Router
from .shares import Shares

_log = logging.getLogger(__name__)

#: Tokens of a link: as fine as prompts in flight are compared.
LINK_TOKENS = 128
MAX_TOKENS = 2**31 - 1
#: Seconds: what was read less than the first ago is read again by no choice. Where a look at many replicas takes long,
#: that is `TIMES` times as long, `MOST_FRESH` at most: reading then takes a fifth of the time.
FRESH, TIMES, MOST_FRESH = 0.005, 4, 0.05


class ReplicaStatus(NamedTuple):
    """This is what a fleet knows of one replica. trust: the value of its `Trust`, "none" where it sends no events.

    silence: seconds since it was heard, None where it sends none. requests, uncached, held: booked requests, their
    prompt tokens that are to be computed, and all their tokens at most.
    """

    name: str
    is_believed: bool
    trust: str
    silence: float | None
    requests: int
    uncached: int
    held: int


#: The addresses of a replica's events and of their replay; None for one that sends none.
Addresses = tuple[str, str] | None


class Fleet:
    """Follows replicas by their KV events, chooses one for each request, and books what it chose.

        fleet = Fleet()
        fleet.follow("engine-0", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
        choice = fleet.choose("request-1", token_ids, max_tokens=256)
        ...send it to choice.replica...; fleet.first_token("request-1") when that comes
        fleet.done("request-1")     completed, failed or cancelled

    A replica is believed while nothing of its events is missing (`Trust.LIVE`) and it was heard less than `silence`
    seconds ago. Others take requests by load, and nothing that they said counts; one that fell silent takes one request
    at a time, and only if no other replica is left more than that. `choose`, `first_token`, `moved`, `done` and `drop`
    never raise and never wait. Not thread-safe. Needs the extra `events`.

    cost: how to choose (`blockyard.routing.costs.COSTS`); None is `Robust`. clock: seconds, that of `time.monotonic`.
    shares: of tenants in the pools of the replicas, if they share these: a request goes where its tenant, whom its
    extra keys tell, is within its floor or its share.
    """

    def __init__(
        self,
        cost: Cost | None = None,
        *,
        silence: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
        shares: Shares | None = None,
    ) -> None:
        self._silence = require_number("silence", silence)
        if self._silence <= 0:
            raise InvalidArgument(f"silence is {silence}; it must be above 0 seconds")
        self.router = Router(Robust() if cost is None else cost, shares)
        self.mirror = Mirror()
        self._subscriber = Subscriber(self.mirror)
        self._clock = clock
        self._followed: set[str] = set()
        #: When events are old enough for a choice to read again.
        self._old_at = -np.inf
        #: By row of the router; None when replicas have changed since the last poll.
        self._is_believed: Bools | None = None
        self._silent: list[str] = []
        #: The workers of an answer of the mirror, and for each the row of the router, -1 for none.
        self._workers: tuple[str, ...] = ()
        self._rows: NDArray[np.int64] = np.zeros(0, np.int64)

    # Who is there.

    def follow(self, replica: str, endpoint: str | None = None, replay_endpoint: str = "", topic: str = "") -> None:
        """Add a replica and listen to its events; without an endpoint it is one that sends none.

        Raises `InvalidArgument` for a name that is there already and an address of bad form, `PublisherError` once the
        fleet is closed.
        """
        if replica in self.router.book.rows:
            raise InvalidArgument(f"replica is {shown(replica)}; it is there already")
        if endpoint is not None:
            self._subscriber.follow(replica, endpoint, replay_endpoint, topic)
            self._followed.add(replica)
        self.router.add(replica)
        self._changed()

    def drop(self, replica: str) -> list[str]:
        """Forget a replica that is gone; return the requests that were booked there. An unknown one has none."""
        if is_name(replica) and replica in self._followed:
            self._followed.discard(replica)
            self._subscriber.unfollow(replica)
        self._changed()
        return self.router.drop(replica)

    def sync(self, replicas: Mapping[str, Addresses]) -> None:
        """Make these all that are there: drop others, follow new ones. A bad address is logged, and not listened to."""
        for name in [name for name in self.router.book.rows if name not in replicas]:
            self.drop(name)
        for name, addresses in replicas.items():
            if name not in self.router.book.rows:
                try:
                    self.follow(name, *(addresses or ()))
                except (BlockyardError, TypeError):
                    _log.exception("replica %s cannot be followed; it takes requests by load", shown(name))
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
        among: Sequence[str] | None = None,
    ) -> Choice:
        """Choose a replica and book the request there, in place of where it was booked before.

        token_ids: (n,) integers, fastest as int32. max_tokens: of the answer. among: the names that may take it. Where
        tokens or keys are bad, `Choice.problem` says so and load alone decides; where `request` has no hash or `among`
        is no list of names, it says so and no replica is chosen. O(blocks that are found + replicas).
        """
        now = self._clock()
        if now >= self._old_at or self._is_believed is None:
            self.poll()
        assert self._is_believed is not None
        num_replicas = len(self._is_believed)
        hits = gpu_hits = np.zeros(num_replicas, np.int64)
        ask, problem = Ask(request, 0, now=now), ""
        try:
            tokens, keys = _as_int32(token_ids), canonical_keys(extra_keys)
            num_more = require_int("max_tokens", max_tokens, 0, MAX_TOKENS)
            shares = self.router.shares
            tenant = -1 if shares is None else shares.tenant_of(keys)
            ask = Ask(request, len(tokens), num_more, session, links_of(tokens, keys), LINK_TOKENS, now, tenant)
            hits, gpu_hits = self._hits(tokens, keys)
        except Exception as error:
            problem = f"load alone decided: {error!r}"
        choice = self.router.choose(ask, hits, gpu_hits, self._is_believed, among, self._shunned())
        choice.problem = choice.problem or problem
        return choice

    def _match(self, tokens: NDArray[np.int32], keys: Any) -> Matches:
        """Match all tokens but the last, which is always computed."""
        return self.mirror.match(tokens, keys, num_tokens=max(len(tokens) - 1, 0))

    def _hits(self, tokens: NDArray[np.int32], keys: Any) -> tuple[Ints, Ints]:
        found = self._match(tokens, keys)
        workers = found.workers
        if workers != self._workers:
            rows = self.router.book.rows
            self._workers, self._rows = workers, np.array([rows.get(name, -1) for name in workers], np.int64)
        # One place more, where the tokens of workers go that are no replicas.
        hits: Ints = np.zeros((2, len(self.router.book.rows) + 1), np.int64)
        hits[0, self._rows], hits[1, self._rows] = found.num_tokens, found.num_gpu_tokens
        return hits[0, :-1], hits[1, :-1]

    def _shunned(self) -> list[str]:
        sums, rows = self.router.book.sums, self.router.book.rows
        return [name for name in self._silent if sums[2, rows[name]] > 0]

    def first_token(self, request: str) -> None:
        """Take note that a request's prompt is computed. A second call, or an unknown name, changes nothing."""
        self.router.first_token(request, self._clock())

    def moved(self, request: str, replica: str) -> None:
        """Take note that another replica has a request than the one chosen. Unknown names change nothing."""
        self.router.moved(request, replica)

    def done(self, request: str, replica: str | None = None) -> None:
        """Free a request: completed, refused, cancelled or lost; with a replica only if it is booked there."""
        self.router.done(request, replica, self._clock())

    # What is known.

    def poll(self) -> int:
        """Read what has arrived without waiting, and see who is believed; return how many messages. Call it often.

        A choice does so by itself if that was not done in the last 5 ms, or four times as long as it took, 50 ms at
        most. O(messages + replicas).
        """
        began = self._clock()
        try:
            count = self._subscriber.poll(0.0)
        except Exception:
            _log.exception("events cannot be read; what is known of replicas grows old")
            count = 0
        believed = []
        self._silent = []
        for name in self.router.book.rows:
            is_silent = name in self._followed and self._subscriber.silence(name) >= self._silence
            if is_silent:
                self._silent.append(name)
            believed.append(name in self._followed and not is_silent and self.mirror.trust(name) is Trust.LIVE)
        self._is_believed = np.array(believed, np.bool_)
        now = self._clock()
        self._old_at = now + min(max(TIMES * (now - began), FRESH), MOST_FRESH)
        return count

    def is_believed(self, replica: str) -> bool:
        """Return whether what a replica says counts, as of the last poll. False for an unknown one."""
        row = self.router.book.rows.get(replica) if is_name(replica) else None
        return row is not None and self._is_believed is not None and bool(self._is_believed[row])

    def status(self) -> list[ReplicaStatus]:
        """Return what is known of each replica, as of the last poll. O(replicas)."""
        found, sums = [], self.router.book.sums
        for name, row in self.router.book.rows.items():
            is_followed = name in self._followed
            trust = self.mirror.trust(name).value if is_followed else "none"
            silence = self._subscriber.silence(name) if is_followed else None
            load = (int(sums[REQUESTS, row]), int(sums[UNCACHED, row]), int(sums[HELD, row]))
            found.append(ReplicaStatus(name, self.is_believed(name), trust, silence, *load))
        return found

    def hits(self, token_ids: Any, extra_keys: Any = ()) -> dict[str, int]:
        """Return how many leading tokens of a prompt each replica can give, believed or not. O(blocks).

        They end before the last token, as `KVCacheManager.num_cached_tokens` does. Raises `InvalidArgument` for bad
        tokens or keys.
        """
        found = self._match(_as_int32(token_ids), extra_keys)
        return {name: match.num_tokens for name, match in found.items()}

    def check(self) -> None:
        """Raise `AssertionError` unless load and prompts in flight are those of the requests that are booked."""
        self.router.check()
        assert self._followed <= self.router.book.rows.keys()

    def close(self) -> None:
        """End the sockets. A second call does nothing."""
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
        raise InvalidArgument(f"token_ids has {tokens.min()} to {tokens.max()}; tokens are from 0 to {MAX_TOKENS}")
    return np.asarray(tokens, np.int32)


def links_of(tokens: NDArray[np.int32], keys: Any = ()) -> Links:
    """Return a key for each `LINK_TOKENS` tokens, of all tokens up to there and the request's extra keys. O(tokens)."""
    data, size = tokens.tobytes(), 4 * LINK_TOKENS
    link, links = hash(repr(keys)) if keys else 0, []
    for start in range(0, len(data) - size + 1, size):
        link = hash((link, data[start : start + size]))
        links.append(link)
    return links
