"""Which names came and went, in order, until the log is taken."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...answers import NameEvent
from ..arrays import zeros_i64
from .names import NAME_WORDS, unpack_name

CAME: Final[i64] = 0
WENT: Final[i64] = 1
CLEARED: Final[i64] = 2
#: What happened, the block, and the name.
ROW_WORDS: Final[i64] = 7
KINDS: Final = ["stored", "removed", "cleared"]


class NameLog:
    """A ring of `max_events` rows: where they are not taken, the oldest are lost, and counted."""

    def __init__(self, max_events: int) -> None:
        self._limit: i64 = max_events
        self._rows = zeros_i64(max_events * int(ROW_WORDS))
        self._first: i64 = 0
        self._count: i64 = 0
        self.num_lost: i64 = 0

    def add(self, kind: i64, block: i64, words: vec[i64], place: i64) -> None:
        """Note one event; the name is in the five words from `place` on. O(1)."""
        if self._count == self._limit:
            self._first = (self._first + 1) % self._limit
            self._count -= 1
            self.num_lost += 1
        row = (self._first + self._count) % self._limit * ROW_WORDS
        self._rows[row] = kind
        self._rows[row + 1] = block
        for word in range(NAME_WORDS):
            self._rows[row + 2 + word] = words[place + word]
        self._count += 1

    def take(self) -> list[NameEvent]:
        """The events, oldest first; the log is empty then. O(events)."""
        events = [self._event((self._first + i64(place)) % self._limit * ROW_WORDS) for place in range(self._count)]
        self._count = 0
        return events

    def _event(self, row: i64) -> NameEvent:
        kind = self._rows[row]
        if kind == CLEARED:
            return NameEvent(KINDS[kind], b"", 0, 0)
        name, group = unpack_name(self._rows, row + 2)
        return NameEvent(KINDS[kind], name, group, int(self._rows[row + 1]))
