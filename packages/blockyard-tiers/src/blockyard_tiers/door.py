"""A door into another engine is a tier that takes its keys for names, and its batches for jobs.

The engine names a page by its own chained hash, which the door takes for its tokens. Under it stands the layout: all
that the engine tells of the model, the dtype, the shape and the rank. It tells no fingerprint of the weights, so the
model's name stands for them; `fingerprint` in the door's configuration is for models whose name stays as they change.
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
from .places import open_tier
from .tier import NAME_BYTES, Job, Prefix


@dataclass(frozen=True, slots=True)
class Ended:
    """This is what came of a batch. good: for each of its keys, whether it was stored, or loaded and found right."""

    ticket: int
    good: list[bool]
    num_bytes: int
    seconds: float


@dataclass(slots=True)
class _Batch:
    ticket: int
    is_load: bool
    names: list[bytes]
    digests: list[bytes]
    buffers: Sequence[Any]
    since: float = field(default_factory=time.monotonic)
    is_second: bool = False


class TierDoor:
    """A door takes an engine's batches to one tier; calls may come from several threads.

    place: as after `serve --tier`, without write=. layout: plain values, as of `layout_id`. A batch that loads and
    meets a bad object is tried once more without it, so what is right of it counts; a batch that stores is all or
    nothing. Buffers belong to the tier until the batch has ended. Raises `InvalidArgument`, `MissingExtra`.
    """

    def __init__(self, place: str, **layout: Any) -> None:
        self.layout = layout_id(**layout)
        self.tier = open_tier("place", place, max_waiting_bytes=2**50)  # the engine's own memory, which is the bound
        self._lock = threading.Lock()
        self._last = 0
        self._running: dict[int, tuple[_Batch, list[int]]] = {}
        self._ended: dict[int, Ended] = {}
        self._given_up: set[int] = set()

    def name(self, key: bytes) -> bytes:
        """Returns the name under which an engine's key stands in the tier."""
        if not isinstance(key, bytes):
            raise InvalidArgument(f"keys has {shown(key)}; a key is bytes")
        return sha256(self.layout + key).digest()[:NAME_BYTES]

    def known(self, keys: Sequence[bytes]) -> Prefix:
        """Returns how many of the keys are there, from the first on, as far as is known now. See `Tier`."""
        return self.tier.longest_prefix([self.name(key) for key in _sequence("keys", keys)])

    def begin(self, is_load: bool, keys: Sequence[bytes], buffers: Sequence[Any]) -> int:
        """Begin to load or store; returns the number by which the batch will be told. O(keys). Blocks for nothing."""
        names = [self.name(key) for key in _sequence("keys", keys)]
        if len(_sequence("buffers", buffers)) != len(names):
            raise InvalidArgument(f"buffers has {len(buffers)} items, keys {len(names)}; a batch has as many of each")
        digests = [blake2b(key, digest_size=NAME_BYTES).digest() for key in keys]
        with self._lock:
            self._last += 1
            batch = _Batch(self._last, is_load, names, digests, buffers)
            self._submit(batch, list({name: place for place, name in enumerate(batch.names)}.values()))
            return batch.ticket

    def ended(self) -> list[Ended]:
        """Returns the batches that ended since the last call, but those that `wait` told."""
        with self._lock:
            self._collect()
            found, self._ended = list(self._ended.values()), {}
        return found

    def wait(self, ticket: int, seconds: float) -> Ended | None:
        """Wait until a batch has ended; None if that takes longer than `seconds`, and its end is not reported later.

        Raises `InvalidArgument` for a ticket of no batch, and for one whose end was reported or given up.
        """
        ticket, seconds = require_int("ticket", ticket, 0, 2**63 - 1), require_number("seconds", seconds)
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                self._collect()
                if ticket in self._ended:
                    return self._ended.pop(ticket)
                if ticket in self._given_up or all(batch.ticket != ticket for batch, _ in self._running.values()):
                    raise InvalidArgument(f"ticket is {ticket}; no batch of this number runs or has yet to be reported")
                if time.monotonic() > end:
                    self._given_up.add(ticket)
                    return None
            time.sleep(0.0002)

    def num_running(self) -> int:
        """Returns how many batches have not ended."""
        with self._lock:
            self._collect()
            return len(self._running)

    def drop_all(self) -> None:
        """Remove all objects of this layout; reads a page of each object in the place. Raises `PlaceError`."""
        ours = []
        for name in self.tier.names():
            try:
                if Header.from_page(self.tier.get(name, PAGE_BYTES)).layout == self.layout:
                    ours.append(name)
            except BadObject:
                continue
        self.tier.drop(ours)
        self.tier.remove(ours)

    def turn(self) -> None:
        """Leave all that is stored to others: from now on names are of a layout that no other engine has."""
        self.layout = layout_id(before=self.layout.hex(), turn=uuid4().hex)

    def close(self) -> None:
        """End the tier's threads."""
        self.tier.close()

    def _submit(self, batch: _Batch, places: list[int]) -> None:
        self._last += 1
        parts = ([each[place] for place in places] for each in (batch.names, batch.digests, batch.buffers))
        job = Job(self._last, self.layout, *parts)
        if (self.tier.load if batch.is_load else self.tier.store)(job) is None:
            self._running[job.id] = batch, places
        else:
            self._end(batch, [])

    def _collect(self) -> None:
        for outcome in self.tier.finished():
            batch, places = self._running.pop(outcome.id)
            good = [place for position, place in enumerate(places) if position not in outcome.causes]
            if not outcome.is_done and batch.is_load and good and not batch.is_second:
                batch.is_second = True
                self._submit(batch, good)
            else:
                self._end(batch, good if outcome.is_done else [])

    def _end(self, batch: _Batch, places: list[int]) -> None:
        if batch.ticket in self._given_up:
            self._given_up.discard(batch.ticket)
            return
        names = {batch.names[place] for place in places}
        wanted = set(places) if batch.is_load else {place for place, name in enumerate(batch.names) if name in names}
        good = [place in wanted for place in range(len(batch.names))]
        num_bytes = sum(memoryview(batch.buffers[place]).nbytes for place in places)
        self._ended[batch.ticket] = Ended(batch.ticket, good, num_bytes, time.monotonic() - batch.since)


def _sequence(name: str, given: Sequence[Any]) -> Sequence[Any]:
    if not isinstance(given, Sequence):
        raise InvalidArgument(f"{name} is {shown(given)}; it must be a sequence")
    return given
