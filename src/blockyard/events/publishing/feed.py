"""From a cache's changes to numbered messages, without sockets: what a publisher sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...kv_events import KVCacheEvents
from ..wire import Batch, Event, encode_batch
from .buffer import ReplayBuffer
from .contents import ContentTable

#: A message: its number and its payload.
Numbered = tuple[int, bytes]


class Feed:
    """Numbers from the clock or from 0, heartbeats, replays, snapshots; see `KVEventPublisher`."""

    def __init__(
        self, table: ContentTable, from_clock: bool, replayed: int, rank: int | None, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._rank = rank
        began = int(clock() * 1e6)
        self._epoch = None if from_clock else began
        self._buffer = ReplayBuffer(began if from_clock else 0, replayed, pads=not from_clock)
        self._table = table

    def changed(self, changes: KVCacheEvents) -> Numbered | None:
        """The message about what a cache told; None where that means nothing to others."""
        events = self._table.apply(changes)
        return self._number(events) if events else None

    def beat(self) -> Numbered:
        """A message that says nothing but its number."""
        return self._number([])

    def replay(self, start: int) -> Iterator[Numbered]:
        """What a consumer needs that has seen all before `start`."""
        return self._buffer.replay(start, lambda: self._encoded(self._table.snapshot()), self._encoded([]))

    def _number(self, events: list[Event]) -> Numbered:
        payload = self._encoded(events)
        return self._buffer.add(payload), payload

    def _encoded(self, events: list[Event]) -> bytes:
        return encode_batch(Batch(self._clock(), events, self._rank, self._epoch))
