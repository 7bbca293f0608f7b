"""What a reader has seen of the rows of a block table, so that looking again costs only what is new."""

from mypy_extensions import i64

from ...ids import NO_ROW
from ..arrays import filled_i64, zeros_i64
from ..sequences.block_table import BlockTable


class SeenRows:
    """At each of `num_places` places: which row was seen there, and how far.

    The row is new to a place that has seen another one, or this one before it was rewritten; else new are its blocks
    from `num_blocks` on, and the places that are null now, from `num_null` on.
    """

    def __init__(self, num_places: i64, width: i64) -> None:
        self.num_places = num_places
        self.width = width
        self.rows = filled_i64(NO_ROW, num_places)
        #: Places that do not hold the null block as far as is known, at first all.
        self.num_blocks = filled_i64(width, num_places)
        self.num_null = zeros_i64(int(num_places))
        self.num_rewrites = zeros_i64(int(num_places))

    def forget(self) -> None:
        """Know nothing of any place."""
        for place in range(self.num_places):
            self.rows[place] = NO_ROW
            self.num_blocks[place] = self.width

    def is_new(self, place: i64, table: BlockTable, row: i64) -> bool:
        """Whether all of a row is new to a place."""
        return (
            self.rows[place] != row
            or self.num_rewrites[place] != table.num_rewrites[row]
            or self.num_blocks[place] > table.num_blocks[row]
            or self.num_null[place] > table.num_null[row]
        )

    def note(self, place: i64, table: BlockTable, row: i64) -> None:
        """All of a row was seen at a place."""
        self.rows[place] = row
        self.num_blocks[place] = table.num_blocks[row]
        self.num_null[place] = table.num_null[row]
        self.num_rewrites[place] = table.num_rewrites[row]

    def note_none(self, place: i64) -> None:
        """Nothing but null blocks is at a place."""
        self.rows[place] = NO_ROW
        self.num_blocks[place] = 0
