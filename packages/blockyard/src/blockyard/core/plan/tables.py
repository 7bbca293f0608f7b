"""Block tables as arrays, and records of the rows that a reader has seen, so that it reads only the changes."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...ids import NO_ROW
from ..arrays import filled_i64, view_i32, view_i64, zeros_i64
from ..sequences.block_table import BlockTable


def whole_table(table: BlockTable) -> npt.NDArray[np.int32]:
    """Return all rows, int32 (max_num_seqs, width), as a read-only live view."""
    return view_i32(table.blocks).reshape(int(table.max_num_seqs), int(table.width))


def rows_of_table(table: BlockTable, rows: vec[i64], width: i64) -> npt.NDArray[np.int32]:
    """Return the first `width` columns of these rows, int32 (rows, width).

    Adjacent rows give a live view, others a copy.
    """
    whole = whole_table(table)
    first = _first_of_adjacent(rows)
    if first >= 0:
        return whole[int(first) : int(first) + len(rows), : int(width)]
    return whole[view_i64(rows), : int(width)]


def widest_row(table: BlockTable, rows: vec[i64]) -> i64:
    """Return the number of blocks of the longest of these rows."""
    num_blocks = table.num_blocks
    widest: i64 = 0
    for row in rows:
        widest = max(widest, num_blocks[row])
    return widest


def _first_of_adjacent(rows: vec[i64]) -> i64:
    """Return the first row if all are adjacent and ascending, else -1."""
    if len(rows) == 0:
        return -1
    first = rows[0]
    for index in range(i64(len(rows))):
        if rows[index] != first + index:
            return -1
    return first


def offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return the running sum of `counts`, int32 (n + 1,): the position where each one's items start."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


class SeenRows:
    """For each of `num_places` positions, the row that was seen there and how much of it.

    All of a row is new to a position that has seen another row, or this row before it was rewritten. Otherwise only its
    blocks from `num_blocks` on, and its null blocks from `num_null` on, are new.
    """

    def __init__(self, num_places: i64, width: i64) -> None:
        self.num_places = num_places
        self.width = width
        self.rows = filled_i64(NO_ROW, num_places)
        #: Columns that may hold other than null blocks, initially all.
        self.num_blocks = filled_i64(width, num_places)
        self.num_null = zeros_i64(int(num_places))
        self.num_rewrites = zeros_i64(int(num_places))

    def forget(self) -> None:
        """Treat all positions as unknown."""
        for place in range(self.num_places):
            self.rows[place] = NO_ROW
            self.num_blocks[place] = self.width

    def is_new(self, place: i64, table: BlockTable, row: i64) -> bool:
        """Return whether all of a row is new to a position."""
        return (
            self.rows[place] != row
            or self.num_rewrites[place] != table.num_rewrites[row]
            or self.num_blocks[place] > table.num_blocks[row]
            or self.num_null[place] > table.num_null[row]
        )

    def note(self, place: i64, table: BlockTable, row: i64) -> None:
        """Record that all of a row was seen at a position."""
        self.rows[place] = row
        self.num_blocks[place] = table.num_blocks[row]
        self.num_null[place] = table.num_null[row]
        self.num_rewrites[place] = table.num_rewrites[row]

    def note_none(self, place: i64) -> None:
        """Record that a position has only null blocks."""
        self.rows[place] = NO_ROW
        self.num_blocks[place] = 0
