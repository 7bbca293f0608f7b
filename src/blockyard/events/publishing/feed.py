"""From a cache's changes to numbered messages, without sockets: what a publisher sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from time import sleep

import numpy as np

from ...core.tokens import MAX_TOKEN
from ...kv_events import KVCacheEvents
from ..tables.content_table import ContentTable
from ..wire import Batch, BatchWriter, Event, Payload, encode_batch
from .buffer import ReplayBuffer

#: Parts of a snapshot that are made in one go, in half a millisecond: then others that wait for the interpreter get it.
EVENTS_A_TURN = 8
#: Numbers from 0 on that a replay fills up, in a few seconds; after them they begin anew.
MOST_PADDED = 2**20
#: A message: its number and its payload.
Numbered = tuple[int, Payload]


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
        #: Messages numbered so far, and the bytes of their payloads; those that say nothing; snapshots and their bytes.
        self.num_messages = self.num_bytes = self.num_heartbeats = 0
        self.num_snapshots = self.snapshot_bytes = 0
        #: See `MOST_PADDED`.
        self.most_padded = MOST_PADDED

    def changed(self, changes: KVCacheEvents) -> Numbered | None:
        """The message about what a cache told; None where that means nothing to others."""
        events = self._table.apply(without_placeholders(changes))
        return self._number(events) if events else None

    def beat(self) -> Numbered:
        """A message that says nothing but its number."""
        self.num_heartbeats += 1
        return self._number([])

    def replay(self, start: int) -> Iterator[Numbered]:
        """What a consumer needs that has seen all before `start`."""
        return self._buffer.replay(start, self._snapshot, self._encoded([]))

    def _snapshot(self) -> Payload:
        """All that is held, in one message. In between other threads run: an engine's may wait."""
        writer = BatchWriter(self._batch([]))
        for number, events in enumerate(self._table.snapshot()):
            writer.add(events)
            if number % EVENTS_A_TURN == 0:
                sleep(0)
        payload = writer.finish()
        self.num_snapshots += 1
        self.snapshot_bytes += len(payload)
        return payload

    def _number(self, events: list[Event]) -> Numbered:
        if self._epoch is not None and self._buffer.next_sequence >= self.most_padded:
            self._begin_anew()
        payload = self._encoded(events)
        self.num_messages += 1
        self.num_bytes += len(payload)
        return self._buffer.add(payload), payload

    def _begin_anew(self) -> None:
        """Numbers from 0 again, as after a restart: a replay that fills up all of them stays short."""
        self._epoch = max(int(self._clock() * 1e6), (self._epoch or 0) + 1)
        self._buffer.begin_anew()

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
