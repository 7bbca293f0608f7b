"""From a cache's changes to numbered messages, without sockets: what a publisher sends.

The latest messages are kept for a replay; a consumer that needs more than those gets a snapshot. A message of any
length is made piece by piece, in turns with an engine's thread.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from time import perf_counter, sleep
from typing import Final

import numpy as np
from msgspec import structs

from ...core.tokens import MAX_TOKEN
from ...kv_events import KVCacheEvents
from ..tables.content_table import ContentTable
from ..wire import Batch, Event, Payload, encode_batch, encode_event, encode_frame

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


class ReplayBuffer:
    """Keeps the payloads of the latest `size` numbers, without gaps. Numbers go on where they began.

    A replay from a number that is kept gives the messages from there. From any other, and from 0, it gives one snapshot
    under the latest number, so a consumer that was away for long, or begins now, holds what the cache holds. With
    `pads`, for consumers that want all numbers from the one they asked for, the snapshot has that number and empty
    messages follow up to the latest.
    """

    def __init__(self, first: int, size: int, pads: bool) -> None:
        self.next_sequence = first
        self._payloads: deque[Payload] = deque(maxlen=size)
        self._first = first
        self._pads = pads
        self._num_lives = 1

    def add(self, payload: Payload) -> int:
        """Number a message."""
        self._payloads.append(payload)
        self.next_sequence += 1
        return self.next_sequence - 1

    def lose(self) -> None:
        """A message could not be made: its number is passed over, and no replay goes over the gap."""
        self._payloads.clear()
        self.next_sequence += 1

    def begin_anew(self) -> None:
        """Numbers begin where they began, and no message is kept."""
        self._payloads.clear()
        self.next_sequence = self._first
        self._num_lives += 1

    def replay(self, start: int, snapshot: Callable[[], Payload], empty: bytes) -> Iterator[tuple[int, Payload]]:
        """Yield the numbered messages that bring a consumer up to date that has seen all before `start`.

        It may be read slowly, while messages are added. It ends early where one that it comes to is gone by then,
        or numbers have begun anew.
        """
        last = self.next_sequence - 1
        if self._first < start <= self.next_sequence and self._oldest <= start:
            while self._oldest <= start < self.next_sequence:
                yield start, self._payloads[start - self._oldest]
                start += 1
        elif self._first <= last and not self._pads:
            yield last, snapshot()
        elif self._first <= last:
            start, life = min(start, last), self._num_lives
            yield start, snapshot()
            for number in range(start + 1, last + 1):
                if self._num_lives != life:
                    return
                yield number, empty

    @property
    def _oldest(self) -> int:
        return self.next_sequence - len(self._payloads)


class Feed:
    """Makes the numbered messages of a `KVEventPublisher`: events, heartbeats, replays and snapshots."""

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
        self.turns = WorkTurns()
        #: Messages numbered so far, and the bytes of their payloads; those that say nothing; snapshots and their bytes.
        self.num_messages = self.num_bytes = self.num_heartbeats = 0
        self.num_snapshots = self.snapshot_bytes = 0
        #: See `MOST_PADDED`.
        self.most_padded = MOST_PADDED

    def changed(self, changes: KVCacheEvents) -> Numbered | None:
        """Returns the message about what a cache told; None where that means nothing to others."""
        events = self.take_in(changes)
        return self.number(events) if events else None

    def take_in(self, changes: KVCacheEvents) -> list[Event]:
        """Return what a cache told, as events, in turns. O(changes)."""
        self.turns.begin()
        return self._table.apply(without_placeholders(changes), self.turns.rest)

    def take_in_if_whole(self, changes: KVCacheEvents) -> None:
        """Do the same without a message; nothing where the table is broken, and this does not begin it anew."""
        if self._table.is_whole or changes.cleared:
            self._table.apply(without_placeholders(changes))

    def beat(self) -> Numbered:
        """Returns a message that says nothing but its number."""
        self.num_heartbeats += 1
        return self.number([])

    def replay(self, start: int) -> Iterator[Numbered]:
        """Return what a consumer needs that has seen all before `start`."""
        return self._buffer.replay(start, self._snapshot, self._encoded([]))

    def _snapshot(self) -> Payload:
        """Return all that is held, in one message, made in turns: an engine's thread may wait for the interpreter."""
        self.turns.begin()
        payload = self._in_turns(self._table.snapshot(), self._table.num_snapshot_bytes())
        self.num_snapshots += 1
        self.snapshot_bytes += len(payload)
        return payload

    def _in_turns(self, parts: Iterable[list[Event]], num_bytes: int) -> Payload:
        """Return a message of `num_bytes` bytes, or somewhat more."""
        message = LongBatch(self._batch([]), num_bytes, self.turns)
        for events in parts:
            for event in events:
                message.add(event)
            self.turns.rest()
        return message.finish()

    def number(self, events: list[Event]) -> Numbered:
        """Returns the next message, with these events."""
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


#: Seconds of work, and of sleep after it. Compiled calls keep the interpreter until they return, and one who waits for
#: it gets it when the thread really sleeps: a core needs some microseconds to wake up, so after `sleep(0)` the thread
#: mostly has the interpreter again before the other one has noticed.
TURN = 0.0002
REST = 0.0001
#: Bytes of which the pages are taken at once: a huge page, where the system has them.
PAGES_AT_ONCE: Final = 2**21
#: Bytes from one that is written to the next. Less than a page, because numpy holds the lock below 500 items.
STEP: Final = 1024
_ZERO: Final = np.uint8(0)


class WorkTurns:
    """Divides work into turns: `rest`, between pieces of work, sleeps where a turn has been long enough."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def begin(self) -> None:
        """A turn begins now: nothing was done before, or without the interpreter."""
        self._began = perf_counter()

    def is_over(self) -> bool:
        """Tells whether the turn has been long enough."""
        return perf_counter() - self._began >= TURN

    def rest(self) -> None:
        """Sleep if it is time."""
        if self.is_over():
            sleep(REST)
            self._began = perf_counter()


class LongBatch:
    """One message whose events come a few at a time. batch: all but its events; num_bytes: about its length; turns: of
    the thread that makes it.

    Its memory is mapped, and its pages are taken a few at a time shortly before they are written, by numpy, which does
    not hold the interpreter's lock meanwhile; they are freed without it, too.
    """

    def __init__(self, batch: Batch, num_bytes: int, turns: WorkTurns) -> None:
        self._turns = turns
        head, self._tail = encode_frame(batch)
        self._memory = _mapped(num_bytes)
        self._room = memoryview(self._memory)
        self._size = 0
        #: Where the pages end that were taken.
        self._end_of_pages = 0
        self._num_events = 0
        self._piece = bytearray()
        self._append(head)
        #: Where the head of the list of events stands: that of a long list, however many there will be.
        self._head = self._size
        self._append(b"\xdd\0\0\0\0")

    def add(self, event: Event) -> None:
        """Encode it behind those before. O(bytes), amortized."""
        encode_event(event, self._piece)
        self._append(self._piece)
        self._num_events += 1

    def finish(self) -> memoryview:
        """Return the payload. Its memory goes with the last view of it."""
        self._room[self._head + 1 : self._head + 5] = self._num_events.to_bytes(4, "big")
        self._append(self._tail)
        return self._room[: self._size].toreadonly()

    def _append(self, piece: bytes | bytearray) -> None:
        end = self._size + len(piece)
        if end > len(self._room):
            self._grow(end)
        if end > self._end_of_pages:
            self._take_pages(end)
        self._room[self._size : end] = piece
        self._size = end

    def _grow(self, least: int) -> None:
        """Twice the room. numpy copies without the interpreter's lock."""
        memory = _mapped(max(2 * len(self._room), least))
        np.copyto(np.frombuffer(memory, np.uint8, self._size), np.frombuffer(self._memory, np.uint8, self._size))
        self._memory, self._room, self._end_of_pages = memory, memoryview(memory), self._size

    def _take_pages(self, end: int) -> None:
        """Write into each page up to `end` and some behind it."""
        end = min(end + PAGES_AT_ONCE, len(self._room))
        np.copyto(np.frombuffer(self._memory, np.uint8)[self._end_of_pages : end : STEP], _ZERO)
        self._end_of_pages = end
        self._turns.begin()


def _mapped(num_bytes: int) -> mmap.mmap:
    """Map zeros, in whole pages, huge ones where the system has them: those take a sixth of the time."""
    memory = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
