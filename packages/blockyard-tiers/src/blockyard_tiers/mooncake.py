"""A Mooncake Store is a tier: its clients lend memory, and its master says where in it an object lies.

Needs Mooncake's wheel without CUDA, `pip install 'blockyard[mooncake]'`, and Debian's libibverbs1, librdmacm1 and
libnuma1.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

import numpy as np
import numpy.typing as npt

from blockyard.arguments import require_int
from blockyard.errors import MissingExtra

from .addresses import LAST_PORT, host_and_port
from .header import PAGE_BYTES, BadObject, Header
from .index import ObjectIndex
from .tier import MAX_OBJECT_BYTES, NAME_BYTES, Cause
from .worker import PlaceError, Task, WorkingTier

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    raise MissingExtra(
        "blockyard_tiers.MooncakeTier needs Mooncake: pip install 'blockyard[mooncake]', and the system's libibverbs1, "
        f"librdmacm1 and libnuma1 ({error})"
    ) from error

_PREFIX = "blockyard:"
#: Seconds for the master to answer at all; the client itself would wait 90 for one that is not there.
_CONNECT_SECONDS = 2.0
#: Mooncake's own numbers: no room; buffers smaller than the object, or no transfer, as where they are larger; not
#: there, or not whole yet.
_NO_ROOM = -200
_LARGER = -600
_FAILED = -800
_NOT_THERE = (-703, -704)
#: Clients of the process that forked this one: to free one would wait for threads that are not here.
_inherited: list[Any] = []


class MooncakeTier(WorkingTier):
    """Keeps the objects in the memory that engines lend to a Mooncake Store, over TCP; several may use it at once.

    url: mooncake://host:port of the master. lent_bytes: memory of this process that is lent to the store while the tier
    is open; what lies in it is a miss for all when it closes or dies (GONE, ABSENT). admin_port: where the master
    answers HTTP, asked by tools alone. The master evicts, which is a miss too; where nothing is lent, or nothing can be
    evicted yet, stores are FULL. max_known: how many objects are remembered to be there. more: see `WorkingTier`.
    There is no password: who reaches the master can write. A client listens on ports of all interfaces.
    Raises `InvalidArgument` for what is no such url. The master is asked in the background.
    """

    def __init__(
        self, url: str, lent_bytes: int = 0, admin_port: int = 9003, max_known: int = 2**20, **more: Any
    ) -> None:
        self._host, self._port = host_and_port("url", url, "mooncake://")
        self._lent_bytes = require_int("lent_bytes", lent_bytes, 0, 2**50)
        self._admin_port = require_int("admin_port", admin_port, 1, LAST_PORT)
        self._client: Any = None
        self._connecting = threading.Lock()
        super().__init__(f"mooncake://{self._host}:{self._port}", ObjectIndex(2**60, max_known), **more)
        self._start()
        self.longest_prefix([bytes(NAME_BYTES)])  # so that memory is lent from now on, and not from the first job on

    def _connected(self) -> Any:
        """Returns the client, which is made when it is first needed, by one thread. Raises `PlaceError`."""
        with self._connecting:
            if self._client is None:
                master = f"{self._host}:{self._port}"
                try:
                    with socket.create_connection((self._host, self._port), _CONNECT_SECONDS) as probe:
                        own = probe.getsockname()[0]  # the address at which the others reach this machine
                except OSError as error:
                    raise PlaceError(Cause.UNREACHABLE, f"the master does not answer: {error}") from None
                client = MooncakeDistributedStore()
                _require_done(client.setup(own, "P2PHANDSHAKE", self._lent_bytes, 0, "tcp", "", master))
                self._client = client
            return self._client

    def close(self, timeout: float = 10.0) -> bool:
        """End the threads and the client; lent memory is taken back. See `Tier.close`."""
        has_ended = super().close(timeout)
        if has_ended and self._client is not None:
            self._client.close()
            self._client = None
        return has_ended

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        _inherited.append(self._client)
        self._client, self._connecting = None, threading.Lock()

    def _write(self, task: Task, positions: list[int]) -> None:
        """Writes objects from where they lie; one that is there already stays as it is."""
        names = [task.job.names[position] for position in positions]
        pages = [task.header(position).to_page() for position in positions]
        some = _addresses([[page, *task.parts[position]] for page, position in zip(pages, positions, strict=True)])
        codes = self._connected().batch_put_from_multi_buffers([_key(name) for name in names], *some)
        if any(codes):
            with suppress(PlaceError):
                self.remove([name for name, code in zip(names, codes, strict=True) if code == 0])
            _require_done(min(codes))

    def _read(self, task: Task, position: int) -> None:
        """Takes an object where it belongs; those of a task come in one call, with its first."""
        if position == 0:
            task.held = self._come_all(task)
        pages, codes = task.held
        name, size = task.job.names[position], PAGE_BYTES + task.length(position)
        if codes[position] in (_LARGER, _FAILED):
            return task.fill(position, memoryview(self.get(name, size + 1)))
        if _require_there(codes[position]) != size:
            raise BadObject(Cause.TRUNCATED)
        header = Header.from_page(bytes(pages[position]))
        task.require(position, header)
        return header.require_payload(task.parts[position])

    def _come_all(self, task: Task) -> tuple[list[bytearray], list[int]]:
        """Returns the pages of all objects, which come where they belong, and Mooncake's numbers."""
        pages = [bytearray(PAGE_BYTES) for _ in task.parts]
        some = _addresses([[page, *parts] for page, parts in zip(pages, task.parts, strict=True)])
        return pages, self._connected().batch_get_into_multi_buffers([_key(name) for name in task.job.names], *some)

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        found = self._connected().batch_is_exist([_key(name) for name in names])
        _require_done(min(found))
        for place in (place for place, is_there in enumerate(found) if is_there):
            if sizes := self._sizes([names[place]]):
                return place, sizes
        return len(names), []

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        client, keys = self._connected(), [_key(name) for name in names]
        found = client.batch_is_exist(keys)
        _require_done(min(found))
        keys = keys[: found.index(0)] if 0 in found else keys
        replicas = client.batch_get_replica_desc(keys) if keys else {}
        sizes: list[int] = []
        for key in keys:
            some = [each for each in replicas.get(key, ()) if each.is_memory_replica()]
            size = some[0].get_memory_descriptor().buffer_descriptor.size if some else client.get_size(key)
            if size <= PAGE_BYTES:
                break
            sizes.append(size - PAGE_BYTES)
        return sizes

    def remove(self, names: Sequence[bytes]) -> None:
        """Removes all of these objects; those that are not there are no error. Raises `PlaceError`."""
        if names:
            codes = self._connected().batch_remove([_key(name) for name in names], True)
            _require_done(min((code for code in codes if code not in _NOT_THERE), default=0))

    def names(self) -> Iterator[bytes]:
        """Goes over the names of all objects, as the master's `admin_port` tells them. Raises `PlaceError`."""
        connection = HTTPConnection(self._host, self._admin_port, timeout=10.0)
        try:
            connection.request("GET", "/get_all_keys")
            keys = connection.getresponse().read().decode(errors="replace").split()
        except (OSError, HTTPException) as error:
            where = f"{self._host}:{self._admin_port}"
            raise PlaceError(Cause.UNREACHABLE, f"the master's HTTP port, {where}: {error}") from None
        finally:
            connection.close()
        for key in keys:
            with suppress(ValueError):
                name = bytes.fromhex(key.removeprefix(_PREFIX))
                if len(name) == NAME_BYTES and _key(name) == key:
                    yield name

    def get(self, name: bytes, num_bytes: int | None = None) -> bytes:
        """Read a whole object or its first bytes, unverified. Raises `BadObject`, `PlaceError`."""
        client, key = self._connected(), _key(name)
        size = _require_there(client.get_size(key))
        count = min(size, PAGE_BYTES + MAX_OBJECT_BYTES + 1 if num_bytes is None else num_bytes)
        data: npt.NDArray[np.uint8] = np.empty(count, np.uint8)
        place = data.ctypes.data
        if count == size:
            return data[: _require_there(client.get_into(key, place, count))].tobytes()
        _require_done(client.register_buffer(place, count))
        try:
            [[[count]]] = client.get_into_ranges([place], [[key]], [[[0]]], [[[0]]], [[[count]]])
        finally:
            client.unregister_buffer(place)
        return data[: _require_there(count)].tobytes()

    def put(self, name: bytes, data: bytes) -> None:
        """Write a whole object, in the place of one that is there. Raises `PlaceError`."""
        array = np.frombuffer(data, np.uint8)
        _require_done(self._connected().upsert_from(_key(name), array.ctypes.data, len(array)))


def _addresses(objects: Sequence[Sequence[Any]]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns where the pieces of each object lie, and their bytes."""
    arrays = [[np.frombuffer(piece, np.uint8) for piece in pieces] for pieces in objects]
    return [[each.ctypes.data for each in some] for some in arrays], [[len(each) for each in some] for some in arrays]


def _key(name: bytes) -> str:
    return _PREFIX + name.hex()


def _require_done(code: int) -> None:
    """Raise `PlaceError` for a number that says what went wrong."""
    if code < 0:
        cause = Cause.FULL if code == _NO_ROOM else Cause.UNREACHABLE
        raise PlaceError(cause, f"Mooncake's error {code}")


def _require_there(code: int) -> int:
    """Returns a count of bytes. Raises `BadObject` where there is no object, else as `_require_done`."""
    if code in _NOT_THERE or code == 0:
        raise BadObject(Cause.ABSENT)
    _require_done(code)
    return code
