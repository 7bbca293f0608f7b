"""Copies of slots for forks, ordered so that each slot is read before it is written."""

from librt.vecs import vec
from mypy_extensions import i64

from ...ids import NO_ROW
from ..arrays import filled_i64, zeros_i64


class SlotCopies:
    """By row, the slot that has its state until the next plan copies it.

    A row may be freed and reused between two plans, so copies may read each other's targets, and form circles.
    """

    def __init__(self, num_rows: int) -> None:
        #: By row, the slot to copy to its own; `NO_ROW` for none.
        self._source = filled_i64(NO_ROW, num_rows)
        self.count: i64 = 0

    def source(self, row: i64) -> i64:
        """Return the slot that has the state of `row` now. O(1)."""
        return row if self._source[row] == NO_ROW else self._source[row]

    def add(self, row: i64, child: i64) -> None:
        """Copy the state of `row` to the slot of `child`, which is no target yet. O(1)."""
        self._source[child] = self.source(row)
        self.count += 1

    def drop(self, row: i64) -> None:
        """Drop the copy to the slot of `row`. O(1)."""
        if self._source[row] != NO_ROW:
            self._source[row] = NO_ROW
            self.count -= 1

    def clear(self) -> None:
        """Drop all copies. O(rows)."""
        for row in range(i64(len(self._source))):
            self._source[row] = NO_ROW
        self.count = 0

    def in_order(self, is_filled: vec[i64]) -> list[int]:
        """Return (from, to) of each copy, one after another, to be carried out in this order. O(rows).

        A circle takes one copy more, through an unused slot. There is one: making a circle took freeing a row.

        Args:
            is_filled: by row, whether its slot has a state, or gets one by these copies.
        """
        num_rows = i64(len(self._source))
        is_read = zeros_i64(int(num_rows))
        for row in range(num_rows):
            if self._source[row] != NO_ROW:
                is_read[self._source[row]] = 1
        #: By slot, the one that has its content so far.
        place = zeros_i64(int(num_rows))
        is_done = zeros_i64(int(num_rows))
        for row in range(num_rows):
            place[row] = row
            is_done[row] = 1 if self._source[row] == NO_ROW else 0
        copies: list[int] = []
        self._break_circles(copies, is_filled, is_read, is_done)
        for row in range(num_rows):
            if is_read[row] == 0:
                self._follow(row, copies, place, is_done)
        return copies

    def _break_circles(self, copies: list[int], is_filled: vec[i64], is_read: vec[i64], is_done: vec[i64]) -> None:
        """Copy the slots of circles that no slot outside reads."""
        num_rows = i64(len(is_read))
        is_seen = is_done[:]
        for leaf in range(num_rows):
            row = leaf
            while is_read[leaf] == 0 and is_seen[row] == 0:
                is_seen[row] = 1
                row = self._source[row]
        for first in range(num_rows):
            if is_seen[first] == 0 and is_done[first] == 0:
                spare: i64 = 0
                while is_read[spare] != 0 or (is_filled[spare] != 0 and self._source[spare] == NO_ROW):
                    spare += 1
                copies += (int(first), int(spare))
                row = first
                while is_done[row] == 0:
                    is_done[row] = 1
                    source = self._source[row]
                    copies += (int(spare if source == first else source), int(row))
                    row = source

    def _follow(self, row: i64, copies: list[int], place: vec[i64], is_done: vec[i64]) -> None:
        """Copy to a slot that no copy reads any longer, then to the one that this frees, and so on."""
        while is_done[row] == 0:
            source = self._source[row]
            copies += (int(place[source]), int(row))
            is_done[row] = 1
            was_there = place[source] == source
            place[source] = row
            if not was_there:
                return
            row = source
