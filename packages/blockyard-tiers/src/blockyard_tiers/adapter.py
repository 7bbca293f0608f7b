"""The part that adapters of other engines share: a tier whose names are an engine's keys.

An engine identifies a page by its own chained hash, which an adapter uses in place of tokens. The layout consists of
everything that the engine reports about the model, the dtype, the shape and the rank. Engines report no fingerprint of
the weights, so the model's name stands for them; pass `fingerprint` if the weights can change under the same name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any
from uuid import uuid4

from blockyard.arguments import require_int, require_number, shown
from blockyard.errors import InvalidArgument

from .header import PAGE_BYTES, BadObject, Header, layout_id
from .tier import NAME_BYTES, Cause, Prefix, Transfer, TransferResult
from .tier_spec import open_tier


@dataclass(frozen=True, slots=True)
class BatchResult:
    """Result of an engine's batch.

    Attributes:
        ticket: the number that `submit` returned.
        good: for each key, whether it was stored, or loaded and verified.
        num_bytes: bytes of the good objects.
        seconds: time since `submit`.
    """

    ticket: int
    good: list[bool]
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class _Batch:
    """Keys that an engine stores or loads together: one transfer, and a second if the load met a bad object."""

    ticket: int
    is_load: bool
    names: list[bytes]
    digests: list[bytes]
    buffers: Sequence[Any]
    since: float = field(default_factory=time.monotonic)
    is_retry: bool = False


class TierAdapter:
    """Stores and loads an engine's batches in one tier. Thread-safe.

    A load that meets a bad object is retried without it, so that the good objects count; a store is all or nothing.
    Buffers belong to the tier until the batch has ended.

    Args:
        place: the tier, as after `serve --tier`, without write=.
        layout: plain values that identify the layout, as for `layout_id`.

    Raises:
        InvalidArgument: `place` is not a tier, or `layout` not plain.
        MissingExtra: the tier's client is not installed.
    """

    def __init__(self, place: str, **layout: Any) -> None:
        self.layout = layout_id(**layout)
        self.tier = open_tier("place", place, max_waiting_bytes=2**50)  # bounded by the engine's own memory
        self._lock = threading.Lock()
        self._last = 0
        #: Batches by the id of their transfer, each with the positions of its objects in the batch.
        self._running: dict[int, tuple[_Batch, list[int]]] = {}
        self._results: dict[int, BatchResult] = {}
        self._abandoned: set[int] = set()
        #: Whether an interrupted call may have lost results, or left a batch without a transfer.
        self._may_miss_results = False

    def name(self, key: bytes) -> bytes:
        """Return the name under which the tier stores an engine's key."""
        if not isinstance(key, bytes):
            raise InvalidArgument(f"keys has {shown(key)}; a key must be bytes")
        return sha256(self.layout + key).digest()[:NAME_BYTES]

    def longest_prefix(self, keys: Sequence[bytes]) -> Prefix:
        """Return how many of the first keys are present without a gap, as far as the tier knows now. O(keys)."""
        return self.tier.longest_prefix([self.name(key) for key in _require_sequence("keys", keys)])

    def submit(self, is_load: bool, keys: Sequence[bytes], buffers: Sequence[Any]) -> int:
        """Start to load or store a batch, and return its ticket. Never blocks. O(keys)."""
        names = [self.name(key) for key in _require_sequence("keys", keys)]
        if len(_require_sequence("buffers", buffers)) != len(names):
            raise InvalidArgument(f"buffers has {len(buffers)} items, keys has {len(names)}; pass one buffer per key")
        digests = [blake2b(key, digest_size=NAME_BYTES).digest() for key in keys]
        with self._lock:
            self._last += 1
            batch = _Batch(self._last, is_load, names, digests, buffers)
            self._submit(batch, list({name: position for position, name in enumerate(names)}.values()))
            return batch.ticket

    def take_results(self) -> list[BatchResult]:
        """Return the results since the last call, except those that `wait` returned."""
        with self._lock:
            self._collect()
            found, self._results = list(self._results.values()), {}
        return found

    def wait(self, ticket: int, seconds: float) -> BatchResult | None:
        """Wait up to `seconds` for a batch, and return its result; None if it has not ended.

        After None the batch is abandoned: its result is not returned later. Raises `InvalidArgument` if no batch has
        this ticket, or its result was returned or abandoned.
        """
        ticket, seconds = require_int("ticket", ticket, 0, 2**63 - 1), require_number("seconds", seconds)
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                self._collect()
                if ticket in self._results:
                    return self._results.pop(ticket)
                if ticket in self._abandoned or all(batch.ticket != ticket for batch, _ in self._running.values()):
                    raise InvalidArgument(f"ticket is {ticket}; no batch with this ticket runs or has a result")
                if time.monotonic() > end:
                    self._abandoned.add(ticket)
                    return None
            time.sleep(0.0002)

    def num_running(self) -> int:
        """Return the number of batches that have not ended."""
        with self._lock:
            self._collect()
            return len(self._running)

    def drop_all(self) -> None:
        """Delete all objects of this layout. Reads a page of every object. Raises `BackendError`."""
        ours = []
        for name in self.tier.names():
            try:
                if Header.from_page(self.tier.get(name, PAGE_BYTES)).layout == self.layout:
                    ours.append(name)
            except BadObject:
                continue
        self.tier.drop(ours)
        self.tier.remove(ours)

    def change_layout(self) -> None:
        """Switch to a new layout that no other engine has, so that nothing stored before is found."""
        self.layout = layout_id(before=self.layout.hex(), turn=uuid4().hex)

    def close(self) -> None:
        """End the tier's threads."""
        self.tier.close()

    def _submit(self, batch: _Batch, positions: list[int]) -> None:
        self._last += 1
        parts = ([each[position] for position in positions] for each in (batch.names, batch.digests, batch.buffers))
        transfer = Transfer(self._last, self.layout, *parts)
        # Before the tier has it: if the call is interrupted, the tier may have queued it.
        self._running[transfer.id] = batch, positions
        try:
            cause = (self.tier.load if batch.is_load else self.tier.store)(transfer)
        except InvalidArgument:
            del self._running[transfer.id]
            raise
        except BaseException:
            self._may_miss_results = True
            raise
        if cause is not None:
            del self._running[transfer.id]
            self._end(batch, [])

    def _collect(self) -> None:
        doubtful, self._may_miss_results = self._may_miss_results, True
        is_quiet = doubtful and self.tier.stats().num_waiting == 0
        results = self.tier.take_results()
        lost = set(self._running) - {result.id for result in results} if is_quiet else set()
        self._end_all([*results, *(TransferResult(number, {0: Cause.CLOSED}, 0, 0.0) for number in lost)])
        self._may_miss_results = doubtful and not is_quiet

    def _end_all(self, results: list[TransferResult]) -> None:
        for result in results:
            if result.id not in self._running:
                continue
            batch, positions = self._running.pop(result.id)
            good = [position for at, position in enumerate(positions) if at not in result.causes]
            if not result.is_done and batch.is_load and good and not batch.is_retry:
                batch.is_retry = True
                self._submit(batch, good)
            else:
                self._end(batch, good if result.is_done else [])

    def _end(self, batch: _Batch, positions: list[int]) -> None:
        if batch.ticket in self._abandoned:
            self._abandoned.discard(batch.ticket)
            return
        names, loaded = {batch.names[position] for position in positions}, set(positions)
        good = [at in loaded if batch.is_load else name in names for at, name in enumerate(batch.names)]
        num_bytes = sum(memoryview(batch.buffers[position]).nbytes for position in positions)
        self._results[batch.ticket] = BatchResult(batch.ticket, good, num_bytes, time.monotonic() - batch.since)


def _require_sequence(name: str, given: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(given, Sequence):
        raise InvalidArgument(f"{name} is {shown(given)}; it must be a sequence")
    return given
