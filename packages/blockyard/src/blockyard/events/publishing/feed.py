"""Makes a publisher's numbered messages from a cache's changes, without sockets.

The latest messages are kept for replays; a consumer that needs more gets a snapshot. Long messages are made piece by
piece, so that the engine's thread gets the interpreter in between.
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

#: Most events encoded at once; more are encoded in turns.
FEW_EVENTS = 16
#: Most numbers that a padded replay sends, in a few seconds; then numbering restarts.
MOST_PADDED = 2**20
#: Random bits of a first number, below the milliseconds since 1970, and of an epoch. They distinguish a restarted
#: publisher even if the clock stands still.
NUMBER_BITS = 21
EPOCH_BITS = 62
#: A message: number and payload.
Numbered = tuple[int, Payload]


class ReplayBuffer:
    """The payloads of the latest `size` numbers, without gaps.

    A replay from a kept number has the messages from there. From any other number, and from 0, it has one snapshot
    under the latest number. With `pads`, for consumers that need all numbers from the requested one, the snapshot has
    that number and empty messages follow up to the latest.
    """

    def __init__(self, first: int, size: int, pads: bool) -> None:
        self.next_sequence = first
        self._payloads: deque[Payload] = deque(maxlen=size)
        self._first = first
        self._pads = pads
        self._num_lives = 1

    def add(self, payload: Payload) -> int:
        """Add a message and return its number."""
        self._payloads.append(payload)
        self.next_sequence += 1
        return self.next_sequence - 1

    def skip(self) -> None:
        """Skip the number of a message that could not be made. No replay crosses this gap."""
        self._payloads.clear()
        self.next_sequence += 1

    def restart(self) -> None:
        """Restart the numbering, without messages."""
        self._payloads.clear()
        self.next_sequence = self._first
        self._num_lives += 1

    def replay(self, start: int, snapshot: Callable[[], Payload], empty: bytes) -> Iterator[tuple[int, Payload]]:
        """Yield the numbered messages for a consumer that has received all before `start`.

        It may be consumed slowly, while messages are added. It ends early if a message is no longer kept, or the
        numbering has restarted.
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
        #: Messages so far, bytes of their payloads, heartbeats; snapshots and their bytes.
        self.num_messages = self.num_bytes = self.num_heartbeats = 0
        self.num_snapshots = self.snapshot_bytes = 0
        #: See `MOST_PADDED`.
        self.most_padded = MOST_PADDED

    def make_message(self, changes: KVCacheEvents) -> Numbered | None:
        """Return the message for a cache's changes; None if they have no effect for consumers."""
        events = self.apply(changes)
        return self.number(events) if events else None

    def apply(self, changes: KVCacheEvents) -> list[Event]:
        """Apply a cache's changes and return their events. The work is done in turns (`WorkTurns`). O(changes)."""
        self.turns.begin()
        return self._table.apply(replace_placeholders(changes), self.turns.rest)

    def apply_if_whole(self, changes: KVCacheEvents) -> None:
        """Apply changes without making a message. If the table is broken, only changes that clear it are applied."""
        if self._table.is_whole or changes.cleared:
            self._table.apply(replace_placeholders(changes))

    def heartbeat(self) -> Numbered:
        """Return a heartbeat."""
        self.num_heartbeats += 1
        return self.number([])

    def replay(self, start: int) -> Iterator[Numbered]:
        """Return the messages for a consumer that has received all before `start`."""
        return self._buffer.replay(start, self._snapshot, self._encoded([]))

    def _snapshot(self) -> Payload:
        """Return all contents in one message, made in turns so that the engine's thread can run."""
        self.turns.begin()
        payload = self._in_turns(self._table.snapshot(), self._table.num_snapshot_bytes())
        self.num_snapshots += 1
        self.snapshot_bytes += len(payload)
        return payload

    def _in_turns(self, parts: Iterable[list[Event]], num_bytes: int) -> Payload:
        """Return a message of about `num_bytes` bytes, made in turns."""
        message = LongBatch(self._batch([]), num_bytes, self.turns)
        for events in parts:
            for event in events:
                message.add(event)
            self.turns.rest()
        return message.finish()

    def number(self, events: list[Event]) -> Numbered:
        """Return the next message, with these events."""
        if self._epoch is not None and self._buffer.next_sequence >= self.most_padded:
            self._restart()
        batch = self._batch(events)
        try:
            payload = self._payload(batch)
        except Exception:  # consumers see a gap and get a snapshot
            self._buffer.skip()
            payload = encode_batch(structs.replace(batch, events=[]))
        self.num_messages += 1
        self.num_bytes += len(payload)
        return self._buffer.add(payload), payload

    def _payload(self, batch: Batch) -> Payload:
        if len(batch.events) <= FEW_EVENTS:
            return encode_batch(batch)
        return self._in_turns(([one] for one in batch.events), 2**20)

    def _restart(self) -> None:
        """Restart the numbering from 0, as if the publisher had restarted, so that padded replays stay short."""
        self._epoch = self._random_bits(EPOCH_BITS)
        self._buffer.restart()

    def _encoded(self, events: list[Event]) -> bytes:
        return encode_batch(self._batch(events))

    def _batch(self, events: list[Event]) -> Batch:
        return Batch(self._clock(), events, self._rank, self._epoch)


def replace_placeholders(changes: KVCacheEvents) -> KVCacheEvents:
    """Return the changes with every placeholder under a span replaced by the largest token, which is valid."""
    tokens = changes.token_ids
    if tokens.size == 0 or tokens.min() >= 0:
        return changes
    return replace(changes, token_ids=np.where(tokens < 0, np.int32(MAX_TOKEN), tokens))


#: Seconds of work, and of sleep after it. Compiled calls hold the interpreter's lock until they return. A waiting
#: thread only gets it if this one really sleeps: waking up takes microseconds, so `sleep(0)` mostly retakes it first.
TURN = 0.0002
REST = 0.0001
#: Bytes whose pages are touched at once: a huge page, if the system has them.
PAGES_AT_ONCE: Final = 2**21
#: Stride of the touched bytes. Less than a page, because numpy keeps the lock below 500 items.
STEP: Final = 1024
_ZERO: Final = np.uint8(0)


class WorkTurns:
    """Divides work into turns. `rest`, called between pieces of work, sleeps when the turn has been long enough."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def begin(self) -> None:
        """Start a turn. The time before it does not count: no work was done, or without the interpreter's lock."""
        self._began = perf_counter()

    def is_over(self) -> bool:
        """Return whether the turn has been long enough."""
        return perf_counter() - self._began >= TURN

    def rest(self) -> None:
        """Sleep if the turn is over."""
        if self.is_over():
            sleep(REST)
            self._began = perf_counter()


class LongBatch:
    """A message whose events are added a few at a time.

    Its memory is mapped, and its pages are touched a few at a time shortly before they are written, by numpy without
    the interpreter's lock; they are also freed without it.

    Args:
        batch: the message without its events.
        num_bytes: approximate length.
        turns: turns of the thread that makes it.
    """

    def __init__(self, batch: Batch, num_bytes: int, turns: WorkTurns) -> None:
        self._turns = turns
        head, self._tail = encode_frame(batch)
        self._memory = _mapped(num_bytes)
        self._room = memoryview(self._memory)
        self._size = 0
        #: End of the pages touched so far.
        self._end_of_pages = 0
        self._num_events = 0
        self._piece = bytearray()
        self._append(head)
        #: Position of the header of the list of events, in the form of a long list.
        self._head = self._size
        self._append(b"\xdd\0\0\0\0")

    def add(self, event: Event) -> None:
        """Append an event. O(bytes), amortized."""
        encode_event(event, self._piece)
        self._append(self._piece)
        self._num_events += 1

    def finish(self) -> memoryview:
        """Return the payload. Its memory is freed with the last view of it."""
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
        """Double the memory. numpy copies without the interpreter's lock."""
        memory = _mapped(max(2 * len(self._room), least))
        np.copyto(np.frombuffer(memory, np.uint8, self._size), np.frombuffer(self._memory, np.uint8, self._size))
        self._memory, self._room, self._end_of_pages = memory, memoryview(memory), self._size

    def _take_pages(self, end: int) -> None:
        """Touch each page up to `end` and some beyond."""
        end = min(end + PAGES_AT_ONCE, len(self._room))
        np.copyto(np.frombuffer(self._memory, np.uint8)[self._end_of_pages : end : STEP], _ZERO)
        self._end_of_pages = end
        self._turns.begin()


def _mapped(num_bytes: int) -> mmap.mmap:
    """Map zeros in whole pages, huge ones if available: those take a sixth of the time."""
    memory = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
