"""A Redis server is a tier: a value holds an object, and the server's own `maxmemory` is the budget.

Needs redis: `pip install 'blockyard[redis]'`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from blockyard.errors import InvalidArgument, MissingExtra

from .header import PAGE_BYTES, BadObject, Header
from .index import ObjectIndex
from .tier import NAME_BYTES, Cause
from .worker import PlaceError, Task, WorkingTier

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtra("blockyard_tiers.RedisTier needs redis: pip install 'blockyard[redis]'") from error

_PREFIX = b"blockyard:"
#: How the server says that there is no such value.
_NOTHING = b"$0\r\n\r\n"
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

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Lends a connection of the client's: what is sent and received by it is not copied."""
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def _read(self, task: Task, position: int) -> None:
        """Receives an object where it belongs. Of one that is larger than is wanted a byte more comes, and no more."""
        name, size = task.job.names[position], PAGE_BYTES + task.length(position)
        with self._errors(), self._connection() as connection:
            connection.send_command("GETRANGE", _key(name), 0, size)
            begin = b"$%d\r\n" % size
            page = memoryview(bytearray(len(begin) + PAGE_BYTES))
            other = _received(connection, page, begin)
            if not other:
                header = Header.from_page(bytes(page[len(begin) :]))
                task.require(position, header)
                for part in task.parts[position]:
                    _received(connection, part)
                _received(connection, page[:2])
                return header.require_payload(task.parts[position])
            if other != _NOTHING:
                connection.disconnect()
        if other == _NOTHING:
            raise BadObject(Cause.ABSENT)
        return task.fill(position, memoryview(self.get(name, size + 1)))

    def _put_pieces(self, name: bytes, pieces: Sequence[bytes | memoryview]) -> None:
        with self._errors(), self._connection() as connection:
            key, size = _key(name), sum(map(len, pieces))
            begin = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)
            connection.send_packed_command([begin, *pieces, b"\r\n"])
            connection.read_response()

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        return list(takewhile(bool, self._all_sizes(names)))

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        sizes = self._all_sizes(names)
        place = next((place for place, size in enumerate(sizes) if size), len(sizes))
        return place, sizes[place : place + 1]

    def _all_sizes(self, names: Sequence[bytes]) -> list[int]:
        """Return the bytes of each object, 0 for what is none, by one exchange with the server."""
        with self._errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.strlen(_key(name))
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                    raise answer
        return [0 if isinstance(answer, Exception) else max(answer - PAGE_BYTES, 0) for answer in answers]

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
        self._put_pieces(name, [data])


def _received(connection: Any, buffer: memoryview, begin: bytes = b"") -> bytes:
    """Fills a buffer with what comes; returns nothing, or what came where it begins in another way than it must."""
    count = 0
    while count < len(buffer):
        num_bytes = connection._sock.recv_into(buffer[count:])
        if num_bytes == 0:
            raise ConnectionError("the server has closed the connection")
        count += num_bytes
        if buffer[: min(count, len(begin))] != begin[:count]:
            return bytes(buffer[:count])
    return b""


def _shown_url(url: str) -> str:
    """Returns an address without what is secret: user and password before the host, or among the options behind it."""
    scheme, _, rest = url.partition("://")
    place, _, options = rest.rpartition("@")[2].partition("?")
    database = next((f"?{option}" for option in options.split("&") if option.startswith("db=")), "")
    return f"{scheme}://{place}{database}"


def _key(name: bytes) -> bytes:
    return _PREFIX + name
