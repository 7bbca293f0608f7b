"""The caller's own arrays for a step's inputs, which `plan.fill` writes."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument
from ..arrays import view_i64, zeros_i64
from ..gate import Gate
from ..sequences.block_table import BlockTable
from .caller_arrays import Column, writable_array
from .tables import SeenRows, rows_of_table, widest_row

#: Up to this many entries, or a share of the array, are written one by one; for more, all rows are copied.
FEW_ENTRIES: Final[i64] = 4096
SHARE: Final[i64] = 16


class TableTarget:
    """An array (rows, columns) of the caller's, and what stands in it. Place i holds the i-th sequence of a step."""

    def __init__(self, value: object) -> None:
        self.array = writable_array("block_tables", value, 2)
        self._flat = self.array.reshape(-1)
        self.num_rows: i64 = self.array.shape[0]
        self.num_columns: i64 = self.array.shape[1]
        self._seen = SeenRows(self.num_rows, self.num_columns)
        #: The table whose rows are noted; None while nothing is known.
        self._table: BlockTable | None = None
        room = int(max(FEW_ENTRIES, self.num_rows * self.num_columns // SHARE))
        self._places = zeros_i64(room)
        self._blocks = zeros_i64(room)
        self._place_view = view_i64(self._places)
        self._block_view = view_i64(self._blocks)
        self._num_entries: i64 = 0
        self._widest: i64 = 0

    def require(self, table: BlockTable, rows: vec[i64], padded: i64) -> None:
        """Raise `InvalidArgument` where the array is too small."""
        if self.num_rows < padded:
            raise InvalidArgument(f"block_tables has {self.num_rows} rows; this step needs {padded}")
        widest = widest_row(table, rows)
        if self.num_columns < widest:
            raise InvalidArgument(f"block_tables has {self.num_columns} columns; this step needs {widest}")

    def write(self, table: BlockTable, rows: vec[i64], padded: i64) -> None:
        """Let the first `padded` rows of the array be these rows of a table, and null blocks behind them."""
        if self._table is not table:
            self._seen.forget()
        # Should anything end this half-way, nothing is known of what stands in the array.
        self._table = None
        self._collect(table, rows, padded)
        if self._num_entries > len(self._places):
            self._copy_whole(table, rows, padded)
        elif self._num_entries > 0:
            end = int(self._num_entries)
            self._flat[self._place_view[:end]] = self._block_view[:end]
        self._table = table

    def forget(self) -> None:
        """Take nothing in the array for known."""
        self._table = None

    def _collect(self, table: BlockTable, rows: vec[i64], padded: i64) -> None:
        """Note where the array differs, or how many entries that would be."""
        seen = self._seen
        self._widest = 0
        num_seqs = i64(len(rows))
        seen_rows = seen.rows
        seen_blocks = seen.num_blocks
        seen_null = seen.num_null
        seen_rewrites = seen.num_rewrites
        num_blocks = table.num_blocks
        num_null = table.num_null
        num_rewrites = table.num_rewrites
        self._num_entries = 0
        for place in range(num_seqs):
            row = rows[place]
            changed = seen_rows[place] ^ row | seen_blocks[place] ^ num_blocks[row]
            changed |= seen_rewrites[place] ^ num_rewrites[row] | seen_null[place] ^ num_null[row]
            if changed != 0:
                self._add_changed(place, table, row)
        for place in range(num_seqs, padded):
            self._add(place, table, 0, 0, 0, seen_blocks[place])
            seen.note_none(place)

    def _add_changed(self, place: i64, table: BlockTable, row: i64) -> None:
        seen = self._seen
        before = seen.num_blocks[place]
        now = table.num_blocks[row]
        if seen.is_new(place, table, row):
            self._add(place, table, row, now, 0, max(before, now))
            seen.note(place, table, row)
            return
        if seen.num_null[place] < table.num_null[row]:
            self._add(place, table, row, now, seen.num_null[place], min(table.num_null[row], before))
            seen.num_null[place] = table.num_null[row]
        self._add(place, table, row, now, before, now)
        seen.num_blocks[place] = now

    def _add(self, place: i64, table: BlockTable, row: i64, num_blocks: i64, first: i64, stop: i64) -> None:
        """Entries `first` to `stop` of a place: those of a row, and the null block behind its blocks."""
        if first >= stop:
            return
        self._widest = max(self._widest, stop)
        position = self._num_entries
        self._num_entries += stop - first
        if self._num_entries > len(self._places):
            return
        source = row * table.width
        target = place * self.num_columns
        for column in range(first, stop):
            self._places[position] = target + column
            self._blocks[position] = i64(table.blocks[source + column]) if column < num_blocks else i64(0)
            position += 1

    def _copy_whole(self, table: BlockTable, rows: vec[i64], padded: i64) -> None:
        num_seqs = len(rows)
        width = int(widest_row(table, rows))
        self.array[:num_seqs, :width] = rows_of_table(table, rows, width)
        self.array[:num_seqs, width : int(self._widest)] = np.int32(0)
        self.array[num_seqs : int(padded), : int(self._widest)] = np.int32(0)


class StepBuffers:
    """Arrays that live as long as the engine: pinned memory, or the static inputs of CUDA graphs. All are optional.

    slot_mapping, input_ids, positions: (most tokens of a step,). seq_lens: (most sequences,). query_start_loc: (most
    sequences + 1,). block_tables: (most sequences, most blocks of one). Each is int32 or int64, contiguous and
    writable: a numpy array, a CPU tensor, or anything with a buffer; it is held and written, never copied.

    `block_tables` is written where it has changed since the last `fill`, so write it nowhere else; if you did, say
    `forget()`. Two sets of buffers that take turns are fine: each knows what stands in its own.

    Raises `InvalidArgument`, which names the array, for any other array, and for two that overlap.
    """

    def __init__(
        self,
        slot_mapping: object = None,
        block_tables: object = None,
        seq_lens: object = None,
        query_start_loc: object = None,
        input_ids: object = None,
        positions: object = None,
    ) -> None:
        self._slot_mapping = _column("slot_mapping", slot_mapping)
        self._block_tables = None if block_tables is None else TableTarget(block_tables)
        self._seq_lens = _column("seq_lens", seq_lens)
        self._query_start_loc = _column("query_start_loc", query_start_loc)
        self._input_ids = _column("input_ids", input_ids)
        self._positions = _column("positions", positions)
        self._require_apart()
        self._gate = Gate()

    def forget(self) -> None:
        """Let the next `fill` write all of `block_tables`: something else wrote into it."""
        if self._block_tables is not None:
            self._block_tables.forget()

    def _columns(self) -> list[Column]:
        columns = [self._slot_mapping, self._seq_lens, self._query_start_loc, self._input_ids, self._positions]
        return [column for column in columns if column is not None]

    def _require_apart(self) -> None:
        names = [column.name for column in self._columns()]
        arrays: list[npt.NDArray[Any]] = [column.array for column in self._columns()]
        if self._block_tables is not None:
            names.append("block_tables")
            arrays.append(self._block_tables.array)
        for index in range(len(names)):
            for other in range(index):
                if np.may_share_memory(arrays[index], arrays[other]):
                    raise InvalidArgument(f"{names[index]} overlaps {names[other]}; each needs memory of its own")


def _column(name: str, value: object) -> Column | None:
    return None if value is None else Column(name, value)
