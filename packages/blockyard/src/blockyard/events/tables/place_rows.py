"""The places (layer group and medium) that hold each content, in a cache with several pools."""

from typing import Final

from mypy_extensions import i32, i64

from ...core.arrays import grown_i32, zeros_i32
from .content_rows import ContentRows
from .holdings import HoldingTable

FEWEST_PLACES: Final = 64


class PlaceRows:
    """A row for each content and place, with the number of blocks that hold the content there. Row 0 is none.

    A place is 2 * layer group + medium. The rows of one content are a list that begins at its `first_place`. A place
    holds a content once it has all its blocks: one, or `num_parts` for a state.

    Args:
        contents: rows of the contents.
        first_state: first place of states, after those of all layer groups.
        num_parts: blocks of a state.
    """

    def __init__(self, contents: ContentRows, first_state: int, num_parts: int) -> None:
        self._contents = contents
        self._first_state: i64 = first_state
        self._num_parts: i64 = num_parts
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        #: (pool, id of a holding) to row.
        self._holdings = HoldingTable(0)
        self._next_row: i64 = 1
        self._free: i64 = 0
        self.content = zeros_i32(FEWEST_PLACES)
        self.place = zeros_i32(FEWEST_PLACES)
        self.num_blocks = zeros_i32(FEWEST_PLACES)
        self.next_one = zeros_i32(FEWEST_PLACES)

    @property
    def num_holdings(self) -> int:
        """Return the number of blocks that hold a content."""
        return int(self._holdings.num_holdings)

    def row_of(self, pool: i64, holding: i64) -> i64:
        """Return the row of a holding, 0 if unknown."""
        return self._holdings.node_of(pool, holding)

    def num_needed(self, row: i64) -> i64:
        """Return how many blocks a row's place needs to hold its content."""
        return self._num_parts if i64(self.place[row]) >= self._first_state else i64(1)

    def is_held(self, row: i64) -> bool:
        """Return whether a row's place holds its content."""
        return i64(self.num_blocks[row]) >= self.num_needed(row)

    def find_held(self, content: i64, place: i64) -> i64:
        """Return the row of a content in a place, 0 if the place does not hold it. O(places of the content)."""
        row = self.find(content, place)
        return row if row != 0 and self.is_held(row) else i64(0)

    def find(self, content: i64, place: i64) -> i64:
        """Return the row of a content in a place, 0 if it has no block of it. O(places of the content)."""
        row = i64(self._contents.first_place[content])
        while row != 0 and self.place[row] != place:
            row = i64(self.next_one[row])
        return row

    def hold(self, pool: i64, holding: i64, content: i64, place: i64) -> bool:
        """Add a block of a content in a place; return whether this completes the content there."""
        row = self.find(content, place)
        if row == 0:
            row = self._new_row(content, place)
        self._holdings.put(pool, holding, row)
        self.num_blocks[row] += 1
        return i64(self.num_blocks[row]) == self.num_needed(row)

    def _new_row(self, content: i64, place: i64) -> i64:
        if self._free != 0:
            row = self._free
            self._free = i64(self.next_one[row])
        else:
            if self._next_row == i64(len(self.place)):
                self._grow()
            row = self._next_row
            self._next_row += 1
        self.content[row] = i32(content)
        self.place[row] = i32(place)
        self.num_blocks[row] = 0
        self.next_one[row] = self._contents.first_place[content]
        self._contents.first_place[content] = i32(row)
        return row

    def _grow(self) -> None:
        capacity = 2 * len(self.place)
        self.content = grown_i32(self.content, capacity)
        self.place = grown_i32(self.place, capacity)
        self.num_blocks = grown_i32(self.num_blocks, capacity)
        self.next_one = grown_i32(self.next_one, capacity)

    def release(self, pool: i64, holding: i64) -> bool:
        """Remove a block. Return whether its place held the content until now. Call `drop_if_empty` next."""
        row = self._holdings.node_of(pool, holding)
        self._holdings.remove(pool, holding)
        self.num_blocks[row] -= 1
        return i64(self.num_blocks[row]) == self.num_needed(row) - 1

    def drop_if_empty(self, row: i64) -> None:
        """Remove a row without blocks."""
        if self.num_blocks[row] > 0:
            return
        content = i64(self.content[row])
        after = self.next_one[row]
        if self._contents.first_place[content] == row:
            self._contents.first_place[content] = after
        else:
            before = i64(self._contents.first_place[content])
            while self.next_one[before] != row:
                before = i64(self.next_one[before])
            self.next_one[before] = after
        self.next_one[row] = i32(self._free)
        self._free = row
        self._contents.drop_if_unused(content)
