"""Records of checkpoints that are being saved, and of the latest checkpoint of each running output."""

from typing import Final

from mypy_extensions import i64

from ...errors import InvariantError
from ..arrays import grown_i32, grown_i64, zeros_i32, zeros_i64

NONE: Final[i64] = 0
#: Status of a record: in no list; saved or given up, and still in the list of its row; its blocks are held for a save;
#: the same, and they are those of the output's checkpoint before, of which all but the first are still cached.
UNLISTED: Final[i64] = 0
DONE: Final[i64] = 1
OPEN: Final[i64] = 2
REPLACING: Final[i64] = 3
#: Records at first. Their number doubles when all are taken.
FEWEST: Final = 64


class SaveRecords:
    """Arrays of records, addressed by number. Each operation is O(1).

    The records of a row form a list, oldest first: `OPEN` or `REPLACING` while blocks are held, `DONE` until `unlink`.
    An unlisted record is the latest checkpoint of its row's output until `free` takes it back.

    Attributes:
        first: by row, its first record; 0 for none.
        num_of_row: by row, the length of its list.
        total: the length of all lists.
        following: by record, the next one in its list; of a free record, the next free one.
        position: by record, its checkpoint position.
        content: by record, the content id of the token block before that; 0 until it is cached.
        status: by record, one of the constants above.
        blocks: the blocks of all records; those of record n begin at n * num_parts.
    """

    def __init__(self, num_rows: int, num_parts: i64) -> None:
        self.num_parts = num_parts
        self.first = zeros_i64(num_rows)
        self._last = zeros_i64(num_rows)
        self.num_of_row = zeros_i64(num_rows)
        self.total: i64 = 0
        self.following = zeros_i64(FEWEST)
        self.position = zeros_i64(FEWEST)
        self.content = zeros_i64(FEWEST)
        self.status = zeros_i64(FEWEST)
        self.blocks = zeros_i32(int(FEWEST * num_parts))
        self._num_made: i64 = 1
        self._free: i64 = NONE

    def next_free(self) -> i64:
        """Return the record that `add` takes next. Amortised O(1). If it raises MemoryError, nothing has changed."""
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
        position = grown_i64(self.position, size)
        content = grown_i64(self.content, size)
        status = grown_i64(self.status, size)
        blocks = grown_i32(self.blocks, size * int(self.num_parts))
        self.following, self.position, self.content, self.status = following, position, content, status
        self.blocks = blocks

    def add(self, row: i64, position: i64) -> None:
        """Append the record that `next_free` returned, and whose blocks are set, to a row's list. Takes no memory."""
        number = self._free
        self._free = self.following[number]
        self.content[number] = 0
        self.append(row, number, position, OPEN)

    def append(self, row: i64, number: i64, position: i64, status: i64) -> None:
        """Append an unlisted record to a row's list; its blocks stay."""
        self.following[number] = NONE
        self.position[number] = position
        self.status[number] = status
        if self.first[row] == NONE:
            self.first[row] = number
        else:
            self.following[self._last[row]] = number
        self._last[row] = number
        self.num_of_row[row] += 1
        self.total += 1

    def unlink(self, row: i64, number: i64, before: i64) -> None:
        """Remove a record from a row's list. before: the record right before it in the list; 0 for none."""
        after = self.following[number]
        if before == NONE:
            self.first[row] = after
        else:
            self.following[before] = after
        if after == NONE:
            self._last[row] = before
        self.status[number] = UNLISTED
        self.num_of_row[row] -= 1
        self.total -= 1

    def free(self, number: i64) -> None:
        """Free an unlisted record."""
        self.following[number] = self._free
        self._free = number

    def blocks_of(self, number: i64) -> list[int]:
        """Return the blocks of a record. O(blocks)."""
        first = number * self.num_parts
        return [int(self.blocks[place]) for place in range(first, first + self.num_parts)]

    def numbers_of(self, row: i64) -> list[int]:
        """Return the records in a row's list."""
        numbers: list[int] = []
        number = self.first[row]
        while number != NONE and len(numbers) <= self.num_of_row[row]:
            numbers.append(int(number))
            number = self.following[number]
        return numbers

    def check(self, unlisted: list[int]) -> None:
        """Check that each record is in one list, free, or one of `unlisted`. O(records + rows).

        Raises `InvariantError`.
        """
        seen = list(unlisted)
        for row in range(len(self.first)):
            numbers = self.numbers_of(i64(row))
            if len(numbers) != self.num_of_row[i64(row)] or (numbers and self._last[i64(row)] != numbers[-1]):
                raise InvariantError(f"states: row {row} lists {len(numbers)} saves, the count is another")
            seen += numbers
        if len(seen) - len(unlisted) != self.total:
            raise InvariantError(f"states: {len(seen) - len(unlisted)} saves are listed, the count is {self.total}")
        number = self._free
        while number != NONE and len(seen) < self._num_made:
            seen.append(int(number))
            number = self.following[number]
        if sorted(seen) != list(range(1, int(self._num_made))):
            raise InvariantError(f"states: of {self._num_made - 1} records of saves, {sorted(seen)} are known")
