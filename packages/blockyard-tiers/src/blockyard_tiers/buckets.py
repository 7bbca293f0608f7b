"""A tier in a bucket of an object store: S3, Google Cloud Storage or Azure, through obstore.

Needs obstore: `pip install 'blockyard[buckets]'`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from blockyard.errors import InvalidArgument, MissingExtra

from .header import PAGE_BYTES, BadObject
from .index import ObjectIndex
from .tier import MAX_OBJECT_BYTES, NAME_BYTES, Cause
from .worker import ActiveTransfer, BackendError, WorkingTier

try:
    import obstore
    from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
    from obstore.store import from_url
except ImportError as error:
    raise MissingExtra("blockyard_tiers.ObjectTier needs obstore: pip install 'blockyard[buckets]'") from error

#: HEAD requests sent together: a lookup of 256 names takes 8 rounds instead of 256.
_HEADS_AT_ONCE = 32
_DENIED = (PermissionDeniedError, UnauthenticatedError)


class ObjectTier(WorkingTier):
    """Keeps objects in a bucket, below the url's path. Several engines may share it.

    The bucket has no budget: let its lifecycle rules delete old objects, which are misses here (GONE). The constructor
    sends no request.

    Args:
        url: s3://bucket/path, gs://... or az://...
        config: options of obstore's store of that kind (endpoint, region, keys). obstore reads missing ones from the
            environment.
        timeout: seconds per request.
        max_known: number of objects remembered as present.
        **more: see `WorkingTier`.

    Raises:
        InvalidArgument: no object store can be opened with `url` and `config`.
    """

    def __init__(
        self,
        url: str,
        config: dict[str, Any] | None = None,
        timeout: float = 10.0,
        max_known: int = 2**20,
        **more: Any,
    ) -> None:
        limits = {"timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=min(timeout, 2.0))}
        retry = {"max_retries": 1, "retry_timeout": timedelta(seconds=timeout)}
        allows = {"allow_http": str((config or {}).get("endpoint", "")).startswith("http://")}
        try:
            self._store: Any = from_url(url, config=config, client_options={**limits, **allows}, retry_config=retry)
        except (BaseError, ValueError, TypeError) as error:
            raise InvalidArgument(f"url is {url!r}; obstore cannot open it: {error}") from None
        super().__init__(url, ObjectIndex(2**60, max_known), **more)
        self._start()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise errors of the store as `BackendError`."""
        try:
            yield
        except _DENIED as error:
            raise BackendError(Cause.DENIED, _brief(error)) from None
        except (BaseError, OSError) as error:
            raise BackendError(Cause.UNREACHABLE, _brief(error)) from None

    def _read(self, active: ActiveTransfer, position: int) -> None:
        data = self._fetch(active.transfer.names[position], most=PAGE_BYTES + active.lengths[position])
        active.fill(position, memoryview(data))

    def _fetch(self, name: bytes, num_bytes: int | None = None, most: int = PAGE_BYTES + MAX_OBJECT_BYTES) -> Any:
        with self._errors():
            try:
                if num_bytes is not None:
                    return self._beginning(name.hex(), num_bytes)
                found = obstore.get(self._store, name.hex())
                if found.meta["size"] > most:
                    return obstore.get_range(self._store, name.hex(), start=0, length=most + 1)
                return found.bytes()
            except (NotFoundError, FileNotFoundError):
                raise BadObject(Cause.ABSENT) from None

    def _beginning(self, key: str, num_bytes: int) -> Any:
        try:
            return obstore.get_range(self._store, key, start=0, length=num_bytes)
        except BaseError:  # an empty object has no beginning
            if obstore.head(self._store, key)["size"] > 0:
                raise
            return b""

    def _sizes(self, names: Sequence[bytes]) -> list[int]:
        sizes: list[Any] = []
        for first in range(0, len(names), _HEADS_AT_ONCE):
            heads = self._heads(names[first : first + _HEADS_AT_ONCE])
            if None in heads:
                return sizes + heads[: heads.index(None)]
            sizes += heads
        return sizes

    def _first(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        for first in range(0, len(names), _HEADS_AT_ONCE):
            for position, size in enumerate(self._heads(names[first : first + _HEADS_AT_ONCE]), first):
                if size is not None:
                    return position, [size]
        return len(names), []

    def _heads(self, names: Sequence[bytes]) -> list[int | None]:
        """Return the payload bytes of each object, None for absent ones, by HEAD requests at the same time."""

        async def head_all() -> list[Any]:
            requests = (obstore.head_async(self._store, name.hex()) for name in names)
            return await asyncio.gather(*requests, return_exceptions=True)

        sizes: list[int | None] = []
        with self._errors():
            for answer in asyncio.run(head_all()):
                is_absent = isinstance(answer, (NotFoundError, FileNotFoundError))
                if isinstance(answer, BaseException) and not is_absent:
                    raise answer
                sizes.append(None if is_absent else max(int(answer["size"]) - PAGE_BYTES, 0))
        return sizes

    def _remove(self, names: Sequence[bytes]) -> None:
        with self._errors():
            for name in names:
                with suppress(NotFoundError, FileNotFoundError):
                    obstore.delete(self._store, name.hex())

    def names(self) -> Iterator[bytes]:
        with self._errors():
            for each in (found for some in obstore.list(self._store, chunk_size=1000) for found in some):
                with suppress(ValueError):
                    name = bytes.fromhex(each["path"])
                    if len(name) == NAME_BYTES and name.hex() == each["path"]:
                        yield name

    def _get(self, name: bytes, num_bytes: int | None) -> bytes:
        return bytes(self._fetch(name, num_bytes))

    def _put(self, name: bytes, data: bytes) -> None:
        with self._errors():
            obstore.put(self._store, name.hex(), data, use_multipart=False)


def _brief(error: Exception) -> str:
    """Return the first line of an error; obstore appends the whole response."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
