"""The payload of a message of any length, made piece by piece in memory that comes and goes without a wait."""

from __future__ import annotations

import mmap

import numpy as np

from ..wire import Batch, Event, encode_event, encode_frame


class LongBatch:
    """One message whose events come a few at a time. batch: all but its events; num_bytes: about its length.

    Its memory is mapped: pages are taken when they are written, and freed without the interpreter's lock, where an
    array of 80 MB would hold it for some milliseconds.
    """

    def __init__(self, batch: Batch, num_bytes: int) -> None:
        head, self._tail = encode_frame(batch)
        self._memory = _mapped(num_bytes)
        self._room = memoryview(self._memory)
        self._size = 0
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
        self._room[self._size : end] = piece
        self._size = end

    def _grow(self, least: int) -> None:
        """Twice the room. numpy copies without the interpreter's lock."""
        memory = _mapped(max(2 * len(self._room), least))
        np.copyto(np.frombuffer(memory, np.uint8, self._size), np.frombuffer(self._memory, np.uint8, self._size))
        self._memory, self._room = memory, memoryview(memory)


def _mapped(num_bytes: int) -> mmap.mmap:
    """Zeros, in whole pages of the usual size: to get a large one may take milliseconds, which is a turn too long."""
    return mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
