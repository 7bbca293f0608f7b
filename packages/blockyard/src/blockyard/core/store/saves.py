"""The saves of states that plans tell of, and the latest state of each output: numbers that name records in arrays."""

from typing import Final

from mypy_extensions import i64

from ...errors import InvariantError
from ..arrays import grown_i32, grown_i64, zeros_i32, zeros_i64

NONE: Final[i64] = 0
#: What a record is: in no list; done, and in the list of its row still; blocks are held for it; and cached, but for the
#: first one: they are those of the state whose place it takes.
APART: Final[i64] = 0
DONE: Final[i64] = 1
OPEN: Final[i64] = 2
OVER: Final[i64] = 3
#: Records at first; there are twice as many whenever all are taken.
FEWEST: Final = 64


class Saves:
    """A record has the boundary, the content once it is known, and the blocks of one state. O(1) an operation.

    The records of a row stand in a list, as they were added: each is `OPEN` or `OVER` while blocks are held for it, and
    `DONE` until `unlink` takes it out. Then it is the latest state of its row's output, or `free` takes it back.
    """

    def __init__(self, num_rows: int, num_parts: i64) -> None:
        self.num_parts = num_parts
        #: The first and the last record of each row, and how many there are; 0 for none.
        self.first = zeros_i64(num_rows)
        self._last = zeros_i64(num_rows)
        self.num_of_row = zeros_i64(num_rows)
        self.total: i64 = 0
        #: Of a free record, the next free one.
        self.following = zeros_i64(FEWEST)
        self.boundary = zeros_i64(FEWEST)
        self.content = zeros_i64(FEWEST)
        self.status = zeros_i64(FEWEST)
        #: The blocks of record n begin at n * num_parts.
        self.blocks = zeros_i32(int(FEWEST * num_parts))
        self._num_made: i64 = 1
        self._free: i64 = NONE

    def next_free(self) -> i64:
        """Return the record that `add` takes next. Amortised O(1). Raises MemoryError; nothing has changed then."""
        if self._free == NONE:
            if self._num_made == len(self.following):
                self._double()
            self.following[self._num_made] = NONE
            self._free = self._num_made
            self._num_made += 1
        return self._free

    def _double(self) -> None:
        size = 2 * len(self.following)
        following = grown_i64(self.following, size)
        boundary = grown_i64(self.boundary, size)
        content = grown_i64(self.content, size)
        status = grown_i64(self.status, size)
        blocks = grown_i32(self.blocks, size * int(self.num_parts))
        self.following, self.boundary, self.content, self.status = following, boundary, content, status
        self.blocks = blocks

    def add(self, row: i64, boundary: i64) -> None:
        """Let the record that `next_free` named, whose blocks are there, be the last of a row. It asks no memory."""
        number = self._free
        self._free = self.following[number]
        self.content[number] = 0
        self.list_again(row, number, boundary, OPEN)

    def list_again(self, row: i64, number: i64, boundary: i64, status: i64) -> None:
        """Let a record that stands in no list be the last of a row, with the blocks that it has."""
        self.following[number] = NONE
        self.boundary[number] = boundary
        self.status[number] = status
        if self.first[row] == NONE:
            self.first[row] = number
        else:
            self.following[self._last[row]] = number
        self._last[row] = number
        self.num_of_row[row] += 1
        self.total += 1

    def unlink(self, row: i64, number: i64, before: i64) -> None:
        """Take a record out of the list of its row, in which `before` (0: none) stands right before it."""
        after = self.following[number]
        if before == NONE:
            self.first[row] = after
        else:
            self.following[before] = after
        if after == NONE:
            self._last[row] = before
        self.status[number] = APART
        self.num_of_row[row] -= 1
        self.total -= 1

    def free(self, number: i64) -> None:
        """A record that stands in no list is free."""
        self.following[number] = self._free
        self._free = number

    def blocks_of(self, number: i64) -> list[int]:
        """Return the blocks of a record. O(blocks)."""
        first = number * self.num_parts
        return [int(self.blocks[place]) for place in range(first, first + self.num_parts)]

    def numbers_of(self, row: i64) -> list[int]:
        """Return the records of a row, in order."""
        numbers: list[int] = []
        number = self.first[row]
        while number != NONE and len(numbers) <= self.num_of_row[row]:
            numbers.append(int(number))
            number = self.following[number]
        return numbers

    def check(self, others: list[int]) -> None:
        """Each record that was made stands in one list, is free, or is one of `others`. O(records + rows).

        Raises `InvariantError`.
        """
        seen = list(others)
        for row in range(len(self.first)):
            numbers = self.numbers_of(i64(row))
            if len(numbers) != self.num_of_row[i64(row)] or (numbers and self._last[i64(row)] != numbers[-1]):
                raise InvariantError(f"states: row {row} lists {len(numbers)} saves, the count is another")
            seen += numbers
        if len(seen) - len(others) != self.total:
            raise InvariantError(f"states: {len(seen) - len(others)} saves are listed, the count says {self.total}")
        number = self._free
        while number != NONE and len(seen) < self._num_made:
            seen.append(int(number))
            number = self.following[number]
        if sorted(seen) != list(range(1, int(self._num_made))):
            raise InvariantError(f"states: of {self._num_made - 1} records of saves, {sorted(seen)} are known")
