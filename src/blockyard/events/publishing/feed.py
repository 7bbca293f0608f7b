"""From a cache's changes to numbered messages, without sockets: what a publisher sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import sleep

import numpy as np

from ...core.tokens import MAX_TOKEN
from ...kv_events import KVCacheEvents
from ..tables.content_table import ContentTable
from ..wire import Batch, Event, encode_batch, encode_events, encode_parts
from .buffer import ReplayBuffer

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
        events = self._table.apply(without_placeholders(changes))
        return self._number(events) if events else None

    def beat(self) -> Numbered:
        """A message that says nothing but its number."""
        return self._number([])

    def replay(self, start: int) -> Iterator[Numbered]:
        """What a consumer needs that has seen all before `start`."""
        return self._buffer.replay(start, self._snapshot, self._encoded([]))

    def _snapshot(self) -> bytes:
        """All that is held, in one message. Between its events other threads run, which an engine's may wait for."""
        parts, num_events = [], 0
        for events in self._table.snapshot():
            parts.append(encode_events(events))
            num_events += len(events)
            sleep(0)
        return encode_parts(self._batch([]), parts, num_events)

    def _number(self, events: list[Event]) -> Numbered:
        payload = self._encoded(events)
        return self._buffer.add(payload), payload

    def _encoded(self, events: list[Event]) -> bytes:
        return encode_batch(self._batch(events))

    def _batch(self, events: list[Event]) -> Batch:
        return Batch(self._clock(), events, self._rank, self._epoch)


def without_placeholders(changes: KVCacheEvents) -> KVCacheEvents:
    """On the wire a token is from 0 on: a placeholder, which stands under a span, is the last of them."""
    tokens = changes.token_ids
    if tokens.size == 0 or tokens.min() >= 0:
        return changes
    return replace(changes, token_ids=np.where(tokens < 0, np.int32(MAX_TOKEN), tokens))
