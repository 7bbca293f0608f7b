"""A tier in a Redis server: one value per object. The server's `maxmemory` is the budget.

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
from .worker import ActiveTransfer, BackendError, WorkingTier

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError, ResponseError
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtra("blockyard_tiers.RedisTier needs redis: pip install 'blockyard[redis]'") from error

_PREFIX = b"blockyard:"
#: The server's reply if there is no such value.
_NO_VALUE = b"$0\r\n\r\n"
#: Keys per command.
_KEYS_PER_COMMAND = 1000
_DENIED = (AuthenticationError, NoPermissionError)


class RedisTier(WorkingTier):
    """Keeps objects as values of a Redis server. Several engines may share it.

    A value that the server evicts is a miss (GONE). A server that does not evict refuses stores as FULL. The
    constructor sends no command.

    Args:
        url: redis://[user:password@]host:port/db, rediss://... or unix:///path.
        timeout: seconds per command.
        max_known: number of objects remembered as present.
        **more: see `WorkingTier`.

    Raises:
        InvalidArgument: `url` is not a Redis address, or sets `decode_responses`.
    """

    def __init__(self, url: str, timeout: float = 5.0, max_known: int = 2**20, **more: Any) -> None:
        try:
            # Retry once: an idle connection may have broken when the server was restarted.
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout, socket_connect_timeout=min(timeout, 2.0), retry=Retry(NoBackoff(), 1)
            )
            pool = self._client.connection_pool
            pool.make_connection()  # sends nothing, but rejects unknown options
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"url is not the address of a Redis server: {error}") from None
        if pool.connection_kwargs.get("decode_responses"):
            raise InvalidArgument("url sets decode_responses; objects are bytes: remove the option")
        super().__init__(_shown_url(url), ObjectIndex(2**60, max_known), **more)
        self._start()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the server and the connection as `BackendError`."""
        try:
            yield
        except (RedisError, OSError) as error:
            text = str(error)
            is_full = isinstance(error, OutOfMemoryError) or "OOM" in text or "maxmemory" in text
            is_denied = isinstance(error, _DENIED) or text.startswith(("NOAUTH", "WRONGPASS", "NOPERM"))
            cause = Cause.DENIED if is_denied else Cause.FULL if is_full else Cause.UNREACHABLE
            raise BackendError(cause, error) from None

    def close(self, timeout: float = 10.0) -> bool:
        has_ended = super().close(timeout)
        self._client.close()
        return has_ended

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Borrow a connection of the client, to send and receive without copying."""
        pool = self._client.connection_pool
        connection = pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            pool.release(connection)

    def _read(self, active: ActiveTransfer, position: int) -> None:
        """Receive an object directly into its buffer. Of a larger value, at most one more byte is sent."""
        name, size = active.transfer.names[position], PAGE_BYTES + active.lengths[position]
        with self._errors(), self._connection() as connection:
            connection.send_command("GETRANGE", _key(name), 0, size)
            begin = b"$%d\r\n" % size
            page = memoryview(bytearray(len(begin) + PAGE_BYTES))
            unexpected = _receive(connection, page, begin)
            if not unexpected:
                header = Header.from_page(bytes(page[len(begin) :]))
                active.require(position, header)
                for part in active.parts[position]:
                    _receive(connection, part)
                _receive(connection, page[:2])
                return header.require_payload(active.parts[position])
            if unexpected != _NO_VALUE:
                connection.disconnect()
        if unexpected == _NO_VALUE:
            raise BadObject(Cause.ABSENT)
        return active.fill(position, memoryview(self._get(name, size + 1)))

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
        position = next((at for at, size in enumerate(sizes) if size), len(sizes))
        return position, sizes[position : position + 1]

    def _all_sizes(self, names: Sequence[bytes]) -> list[int]:
        """Return the bytes of each object, 0 for absent ones, in one exchange with the server."""
        with self._errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.strlen(_key(name))
            answers = pipeline.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                    raise answer
        return [0 if isinstance(answer, Exception) else max(answer - PAGE_BYTES, 0) for answer in answers]

    def _remove(self, names: Sequence[bytes]) -> None:
        with self._errors():
            for first in range(0, len(names), _KEYS_PER_COMMAND):
                self._client.unlink(*map(_key, names[first : first + _KEYS_PER_COMMAND]))

    def names(self) -> Iterator[bytes]:
        with self._errors():
            for key in self._client.scan_iter(match=_PREFIX + b"*", count=_KEYS_PER_COMMAND):
                if len(key) == len(_PREFIX) + NAME_BYTES:
                    yield key[len(_PREFIX) :]

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
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

    def _put(self, name: bytes, data: bytes) -> None:
        self._put_pieces(name, [data])


def _receive(connection: Any, buffer: memoryview, begin: bytes = b"") -> bytes:
    """Read a reply into `buffer`. Return the bytes read if the reply does not begin with `begin`, else b""."""
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
    """Return an address without user, password, and options other than `db`."""
    scheme, _, rest = url.partition("://")
    address, _, options = rest.rpartition("@")[2].partition("?")
    database = next((f"?{option}" for option in options.split("&") if option.startswith("db=")), "")
    return f"{scheme}://{address}{database}"


def _key(name: bytes) -> bytes:
    return _PREFIX + name
