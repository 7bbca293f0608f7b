"""From a cache's changes to numbered messages, without sockets: what a publisher sends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
from msgspec import structs

from ...core.tokens import MAX_TOKEN
from ...kv_events import KVCacheEvents
from ..tables.content_table import ContentTable
from ..wire import Batch, Event, Payload, encode_batch
from .buffer import ReplayBuffer
from .long_batch import LongBatch
from .turns import Turns

#: Events that are encoded in one go; more are encoded in turns.
FEW_EVENTS = 16
#: Numbers from 0 on that a replay fills up, in a few seconds; after them they begin anew.
MOST_PADDED = 2**20
#: Random bits of a first number, below the milliseconds since 1970, and of an epoch: a publisher that begins anew while
#: its clock stands still is another one all the same.
NUMBER_BITS = 21
EPOCH_BITS = 62
#: A message: its number and its payload.
Numbered = tuple[int, Payload]


class Feed:
    """Numbers from the clock or from 0, heartbeats, replays, snapshots; see `KVEventPublisher`."""

    def __init__(
        self,
        table: ContentTable,
        from_clock: bool,
        replayed: int,
        rank: int | None,
        clock: Callable[[], float],
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        self._clock = clock
        self._rank = rank
        self._random_bits = random_bits
        self._epoch = None if from_clock else random_bits(EPOCH_BITS)
        first = (int(1000 * clock()) << NUMBER_BITS) + random_bits(NUMBER_BITS) if from_clock else 0
        self._buffer = ReplayBuffer(first, replayed, pads=not from_clock)
        self._table = table
        self.turns = Turns()
        #: Messages numbered so far, and the bytes of their payloads; those that say nothing; snapshots and their bytes.
        self.num_messages = self.num_bytes = self.num_heartbeats = 0
        self.num_snapshots = self.snapshot_bytes = 0
        #: See `MOST_PADDED`.
        self.most_padded = MOST_PADDED

    def changed(self, changes: KVCacheEvents) -> Numbered | None:
        """The message about what a cache told; None where that means nothing to others."""
        events = self.take_in(changes)
        return self.number(events) if events else None

    def take_in(self, changes: KVCacheEvents) -> list[Event]:
        """What a cache told, as events, in turns. O(changes)."""
        self.turns.begin()
        return self._table.apply(without_placeholders(changes), self.turns.rest)

    def take_in_if_whole(self, changes: KVCacheEvents) -> None:
        """The same without a message; nothing where the table is broken, and this does not begin it anew."""
        if self._table.is_whole or changes.cleared:
            self._table.apply(without_placeholders(changes))

    def beat(self) -> Numbered:
        """A message that says nothing but its number."""
        self.num_heartbeats += 1
        return self.number([])

    def replay(self, start: int) -> Iterator[Numbered]:
        """What a consumer needs that has seen all before `start`."""
        return self._buffer.replay(start, self._snapshot, self._encoded([]))

    def _snapshot(self) -> Payload:
        """All that is held, in one message, made in turns: an engine's thread may wait for the interpreter."""
        self.turns.begin()
        payload = self._in_turns(self._table.snapshot(), self._table.num_snapshot_bytes())
        self.num_snapshots += 1
        self.snapshot_bytes += len(payload)
        return payload

    def _in_turns(self, parts: Iterable[list[Event]], num_bytes: int) -> Payload:
        """A message of `num_bytes` bytes, or somewhat more."""
        message = LongBatch(self._batch([]), num_bytes, self.turns)
        for events in parts:
            for event in events:
                message.add(event)
            self.turns.rest()
        return message.finish()

    def number(self, events: list[Event]) -> Numbered:
        """The next message, of these events."""
        if self._epoch is not None and self._buffer.next_sequence >= self.most_padded:
            self._begin_anew()
        batch = self._batch(events)
        try:
            payload = self._payload(batch)
        except Exception:  # consumers see a gap, and get a snapshot
            self._buffer.lose()
            payload = encode_batch(structs.replace(batch, events=[]))
        self.num_messages += 1
        self.num_bytes += len(payload)
        return self._buffer.add(payload), payload

    def _payload(self, batch: Batch) -> Payload:
        if len(batch.events) <= FEW_EVENTS:
            return encode_batch(batch)
        return self._in_turns(([one] for one in batch.events), 2**20)

    def _begin_anew(self) -> None:
        """Numbers from 0 again, as after a restart: a replay that fills up all of them stays short."""
        self._epoch = self._random_bits(EPOCH_BITS)
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
