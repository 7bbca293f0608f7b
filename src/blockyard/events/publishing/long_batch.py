"""Makes the payload of a message of any length piece by piece, in turns with an engine's thread.

Its memory comes and goes without a wait for the interpreter.
"""

from __future__ import annotations

import contextlib
import mmap
from time import perf_counter, sleep
from typing import Final

import numpy as np

from ..wire import Batch, Event, encode_event, encode_frame

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


class Turns:
    """Divides work into turns: `rest`, between pieces of work, sleeps where a turn has been long enough."""

    def __init__(self) -> None:
        self._began = perf_counter()

    def begin(self) -> None:
        """A turn begins now: nothing was done before, or without the interpreter."""
        self._began = perf_counter()

    def is_over(self) -> bool:
        """Whether the turn has been long enough."""
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

    def __init__(self, batch: Batch, num_bytes: int, turns: Turns) -> None:
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
        """The payload. Its memory goes with the last view of it."""
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
    """Zeros, in whole pages, huge ones where the system has them: those take a sixth of the time."""
    memory = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
