"""A Redis server is a tier: a value holds an object, and the server's own `maxmemory` is the budget.

Needs redis: `pip install 'blockyard[redis]'`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import InvalidArgument, MissingExtra
from .header import PAGE_BYTES, BadObject
from .index import ObjectIndex
from .tier import NAME_BYTES, Cause
from .worker import PlaceError, Task, WorkingTier

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtra("blockyard.tiers.RedisTier needs redis: pip install 'blockyard[redis]'") from error

_PREFIX = b"blockyard:"
#: Keys in one command.
_A_GO = 1000
_DENIED = (AuthenticationError, NoPermissionError)


class RedisTier(WorkingTier):
    """Keeps the objects as values of a Redis server; several engines may use it at once.

    url: redis://[user:password@]host:port/db, rediss://... or unix:///path. What the server evicts is a miss (GONE);
    one that does not evict refuses stores as FULL. timeout: of a command, in
    seconds. max_known: how many objects are remembered to be there. more: see `WorkingTier`.
    Raises `InvalidArgument` for what is no such url. Asks the server nothing yet.
    """

    def __init__(self, url: str, timeout: float = 5.0, max_known: int = 2**20, **more: Any) -> None:
        try:
            # The second trial is for a server that was started again: a connection that broke says nothing of it.
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=min(timeout, 2.0), retry=Retry(NoBackoff(), 1)
            )
            pool = self._client.connection_pool
            pool.make_connection()  # asks nothing; an option that no connection has is found
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"url is no address of a Redis server: {error}") from None
        if pool.connection_kwargs.get("decode_responses"):
            raise InvalidArgument("url has decode_responses; objects are bytes, and not text")
        super().__init__(_shown_url(url), ObjectIndex(2**60, max_known), **more)
        self._start()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Tells errors of the server and of the way to it by their causes."""
        try:
            yield
        except (RedisError, OSError) as error:
            text = str(error)
            is_full = isinstance(error, OutOfMemoryError) or "OOM" in text or "maxmemory" in text
            is_denied = isinstance(error, _DENIED) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM"))
            cause = Cause.DENIED if is_denied else Cause.FULL if is_full else Cause.UNREACHABLE
            raise PlaceError(cause, error) from None

    def close(self, timeout: float = 10.0) -> bool:
        """End the threads and the connections. See `Tier.close`."""
        has_ended = super().close(timeout)
        self._client.close()
        return has_ended

    def _read(self, task: Task, position: int) -> None:
        # One byte more than is wanted: whatever a value's size, no more of it comes here.
        data = self.get(task.job.names[position], PAGE_BYTES + task.length(position) + 1)
        task.fill(position, memoryview(data))

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        with self._errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.strlen(_key(name))
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                    raise answer
        sizes: list[int] = []
        for answer in answers:
            if isinstance(answer, Exception) or answer <= PAGE_BYTES:
                break
            sizes.append(answer - PAGE_BYTES)
        return sizes

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes all of these values; those that are not there are no error. Raises `PlaceError`."""
        with self._errors():
            for first in range(0, len(names), _A_GO):
                self._client.unlink(*map(_key, names[first : first + _A_GO]))

    def names(self) -> Iterator[bytes]:
        """Goes over the names of all objects. Raises `PlaceError`."""
        with self._errors():
            for key in self._client.scan_iter(match=_PREFIX + b"*", count=_A_GO):
                if len(key) == len(_PREFIX) + NAME_BYTES:
                    yield key[len(_PREFIX) :]

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole value or its first bytes, unverified. Raises `BadObject`, `PlaceError`."""
        with self._errors():
            try:
                key, last = _key(name), -1 if num_bytes is None else num_bytes - 1
                value: bytes | None = self._client.get(key) if last < 0 else self._client.getrange(key, 0, last)
            except ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    raise BadObject(Cause.DAMAGED) from None
                raise
        if not value:
            raise BadObject(Cause.ABSENT)
        return value

    def put(self, name: bytes, data: bytes) -> None:
        """Write a whole value. Raises `PlaceError`."""
        with self._errors():
            self._client.set(_key(name), data)


def _shown_url(url: str) -> str:
    """Returns an address without what is secret: user and password before the host, or among the options behind it."""
    scheme, _, rest = url.partition("://")
    place, _, options = rest.rpartition("@")[2].partition("?")
    database = next((f"?{option}" for option in options.split("&") if option.startswith("db=")), "")
    return f"{scheme}://{place}{database}"


def _key(name: bytes) -> bytes:
    return _PREFIX + name
