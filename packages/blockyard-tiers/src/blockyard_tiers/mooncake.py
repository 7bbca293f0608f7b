"""A tier in a Mooncake Store: its clients lend memory, and its master knows where each object lies.

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
from .worker import ActiveTransfer, BackendError, WorkingTier

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    raise MissingExtra(
        "blockyard_tiers.MooncakeTier needs Mooncake: pip install 'blockyard[mooncake]', and the system's libibverbs1, "
        f"librdmacm1 and libnuma1 ({error})"
    ) from error

_PREFIX = "blockyard:"
#: Seconds for connecting to the master; without a master the client itself would wait 90.
_CONNECT_SECONDS = 2.0
#: Mooncake's result codes: no room; buffers smaller than the object; no transfer, as if buffers are larger; absent or
#: incomplete.
_NO_ROOM = -200
_LARGER = -600
_FAILED = -800
_ABSENT = (-703, -704)
#: Clients of the parent process, kept alive: freeing one would wait for threads that this process does not have.
_inherited: list[Any] = []


class MooncakeTier(WorkingTier):
    """Keeps objects in the memory that engines lend to a Mooncake Store, over TCP. Several engines may share it.

    An object that the master evicts is a miss. If no memory is lent, or nothing can be evicted yet, stores are FULL.
    There is no password: whoever reaches the master can write. A client listens on ports of all interfaces. The master
    is contacted in the background.

    Args:
        url: mooncake://host:port of the master.
        lent_bytes: memory of this process that is lent to the store while the tier is open. When it closes or dies,
            objects in that memory are misses for everyone (GONE, ABSENT).
        admin_port: HTTP port of the master; only tools use it.
        max_known: number of objects remembered as present.
        **more: see `WorkingTier`.

    Raises:
        InvalidArgument: `url` is not such an address.
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
        self.longest_prefix([bytes(NAME_BYTES)])  # so that memory is lent from now on

    def _connected(self) -> Any:
        """Return the client, which one thread creates on first use. Raises `BackendError`."""
        with self._connecting:
            if self._client is None:
                master = f"{self._host}:{self._port}"
                try:
                    with socket.create_connection((self._host, self._port), _CONNECT_SECONDS) as probe:
                        own = probe.getsockname()[0]  # the address at which others reach this machine
                except OSError as error:
                    raise BackendError(Cause.UNREACHABLE, f"the master does not answer: {error}") from None
                client = MooncakeDistributedStore()
                _require_done(client.setup(own, "P2PHANDSHAKE", self._lent_bytes, 0, "tcp", "", master))
                self._client = client
            return self._client

    def close(self, timeout: float = 10.0) -> bool:
        """End the threads and the client, and take back lent memory. See `Tier.close`."""
        has_ended = super().close(timeout)
        if has_ended and self._client is not None:
            self._client.close()
            self._client = None
        return has_ended

    def _begin_in_child(self) -> None:
        super()._begin_in_child()
        _inherited.append(self._client)
        self._client, self._connecting = None, threading.Lock()

    def _write(self, active: ActiveTransfer, positions: list[int]) -> None:
        """Write objects from their buffers; existing ones are unchanged."""
        names = [active.transfer.names[position] for position in positions]
        pages = [active.header(position).to_page() for position in positions]
        buffers = _addresses([[page, *active.parts[position]] for page, position in zip(pages, positions, strict=True)])
        codes = self._connected().batch_put_from_multi_buffers([_key(name) for name in names], *buffers)
        if any(codes):
            with suppress(BackendError):
                self._remove([name for name, code in zip(names, codes, strict=True) if code == 0])
            _require_done(min(codes))

    def _read(self, active: ActiveTransfer, position: int) -> None:
        """Receive an object directly into its buffer; the first call receives all objects of a transfer."""
        if position == 0:
            active.backend_state = self._read_all(active)
        pages, codes = active.backend_state
        name, size = active.transfer.names[position], PAGE_BYTES + active.lengths[position]
        if codes[position] in (_LARGER, _FAILED):
            return active.fill(position, memoryview(self._get(name, size + 1)))
        if _require_present(codes[position]) != size:
            raise BadObject(Cause.TRUNCATED)
        header = Header.from_page(bytes(pages[position]))
        active.require(position, header)
        return header.require_payload(active.parts[position])

    def _read_all(self, active: ActiveTransfer) -> tuple[list[bytearray], list[int]]:
        """Receive all objects into their buffers; return their pages and Mooncake's result codes."""
        pages = [bytearray(PAGE_BYTES) for _ in active.parts]
        buffers = _addresses([[page, *parts] for page, parts in zip(pages, active.parts, strict=True)])
        return pages, self._connected().batch_get_into_multi_buffers(
            [_key(name) for name in active.transfer.names], *buffers
        )

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        found = self._connected().batch_is_exist([_key(name) for name in names])
        _require_done(min(found))
        for position in (at for at, is_present in enumerate(found) if is_present):
            if sizes := self._sizes([names[position]]):
                return position, sizes
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

    def _remove(self, names: Sequence[bytes]) -> None:
        if names:
            codes = self._connected().batch_remove([_key(name) for name in names], True)
            _require_done(min((code for code in codes if code not in _ABSENT), default=0))

    def names(self) -> Iterator[bytes]:
        """Yield the names of all objects, as reported by the master's `admin_port`. Raises `BackendError`."""
        connection = HTTPConnection(self._host, self._admin_port, timeout=10.0)
        try:
            connection.request("GET", "/get_all_keys")
            keys = connection.getresponse().read().decode(errors="replace").split()
        except (OSError, HTTPException) as error:
            where = f"{self._host}:{self._admin_port}"
            raise BackendError(Cause.UNREACHABLE, f"the master's HTTP port, {where}: {error}") from None
        finally:
            connection.close()
        for key in keys:
            with suppress(ValueError):
                name = bytes.fromhex(key.removeprefix(_PREFIX))
                if len(name) == NAME_BYTES and _key(name) == key:
                    yield name

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
        client, key = self._connected(), _key(name)
        size = _require_present(client.get_size(key))
        count = min(size, PAGE_BYTES + MAX_OBJECT_BYTES + 1 if num_bytes is None else num_bytes)
        data: npt.NDArray[np.uint8] = np.empty(count, np.uint8)
        address = data.ctypes.data
        if count == size:
            return data[: _require_present(client.get_into(key, address, count))].tobytes()
        _require_done(client.register_buffer(address, count))
        try:
            [[[count]]] = client.get_into_ranges([address], [[key]], [[[0]]], [[[0]]], [[[count]]])
        finally:
            client.unregister_buffer(address)
        return data[: _require_present(count)].tobytes()

    def _put(self, name: bytes, data: bytes) -> None:
        array = np.frombuffer(data, np.uint8)
        _require_done(self._connected().upsert_from(_key(name), array.ctypes.data, len(array)))


def _addresses(objects: Sequence[Sequence[Any]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the addresses and the lengths of each object's buffers."""
    arrays = [[np.frombuffer(piece, np.uint8) for piece in pieces] for pieces in objects]
    return [[each.ctypes.data for each in some] for some in arrays], [[len(each) for each in some] for some in arrays]


def _key(name: bytes) -> str:
    return _PREFIX + name.hex()


def _require_done(code: int) -> None:
    """Raise `BackendError` if a result code is an error."""
    if code < 0:
        cause = Cause.FULL if code == _NO_ROOM else Cause.UNREACHABLE
        raise BackendError(cause, f"Mooncake's error code {code}")


def _require_present(code: int) -> int:
    """Return a byte count. Raises `BadObject` if there is no object, `BackendError` for other errors."""
    if code in _ABSENT or code == 0:
        raise BadObject(Cause.ABSENT)
    _require_done(code)
    return code
