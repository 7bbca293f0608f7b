"""The caller's own arrays for a step's inputs, written by `plan.fill`."""

from typing import Final

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument
from ..arrays import view_i64, zeros_i64
from ..gate import Gate
from ..sequences.block_table import BlockTable
from .caller_arrays import FilledStep, Target
from .columns import LengthColumn, PositionColumn, SlotColumn, StartColumn, TokenColumn
from .tables import SeenRows, rows_of_table, widest_row

#: Up to this many entries, or this fraction of the array, are written one by one; beyond that all rows are copied.
FEW_ENTRIES: Final[i64] = 4096
SHARE: Final[i64] = 16


class TableTarget(Target):
    """The caller's array for block tables, (rows, columns). Row i is that of the step's i-th sequence."""

    def __init__(self, value: object) -> None:
        super().__init__("block_tables", value, 2)
        self._flat = self.array.reshape(-1)
        self.num_rows: i64 = self.array.shape[0]
        self.num_columns: i64 = self.array.shape[1]
        self._seen = SeenRows(self.num_rows, self.num_columns)
        #: The table whose rows it contains; None if unknown.
        self._table: BlockTable | None = None
        room = int(max(FEW_ENTRIES, self.num_rows * self.num_columns // SHARE))
        self._places = zeros_i64(room)
        self._blocks = zeros_i64(room)
        self._place_view = view_i64(self._places)
        self._block_view = view_i64(self._blocks)
        self._num_entries: i64 = 0
        self._widest: i64 = 0

    def is_of_group(self) -> bool:
        return True

    def require(self, step: FilledStep) -> None:
        if self.num_rows < step.padded_seqs:
            raise InvalidArgument(f"block_tables has {self.num_rows} rows; this step needs {step.padded_seqs}")
        widest = widest_row(step.table, step.batch.rows)
        if self.num_columns < widest:
            raise InvalidArgument(f"block_tables has {self.num_columns} columns; this step needs {widest}")

    def write(self, step: FilledStep) -> None:
        """Write the changed entries of the sequences' rows, and null blocks into padded rows."""
        table, rows, padded = step.table, step.batch.rows, step.padded_seqs
        if self._table is not table:
            self._seen.forget()
        # If an interrupt ends this half-way, the contents are unknown.
        self._table = None
        self._collect(table, rows, padded)
        if self._num_entries > len(self._places):
            self._copy_whole(table, rows, padded)
        elif self._num_entries > 0:
            end = int(self._num_entries)
            self._flat[self._place_view[:end]] = self._block_view[:end]
        self._table = table

    def forget(self) -> None:
        self._table = None

    def _collect(self, table: BlockTable, rows: vec[i64], padded: i64) -> None:
        """Collect the entries that differ; if they are too many, only count them."""
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
        """Collect entries `first` to `stop` of a position: those of a row, and null blocks after them."""
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
    """Persistent arrays for a step's inputs: pinned memory, or static inputs of CUDA graphs.

    Each array is optional. It must be int32 or int64, contiguous and writable: a numpy array, a CPU tensor, or any
    buffer. It is referenced and written, never copied. Only changed entries of `block_tables` are written, so do not
    write to it yourself, or call `forget()` if you did. Two sets of buffers may be used in turn.

    Args:
        slot_mapping: (most tokens of a step,).
        block_tables: (most sequences, most blocks per sequence).
        seq_lens: (most sequences,).
        query_start_loc: (most sequences + 1,).
        input_ids: (most tokens of a step,).
        positions: (most tokens of a step,).

    Raises:
        InvalidArgument: an array is unsuitable, or two overlap.
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
        #: The arrays that were given.
        self.targets: list[Target] = []
        if slot_mapping is not None:
            self.targets.append(SlotColumn("slot_mapping", slot_mapping))
        if input_ids is not None:
            self.targets.append(TokenColumn("input_ids", input_ids))
        if positions is not None:
            self.targets.append(PositionColumn("positions", positions))
        if seq_lens is not None:
            self.targets.append(LengthColumn("seq_lens", seq_lens))
        if query_start_loc is not None:
            self.targets.append(StartColumn("query_start_loc", query_start_loc))
        if block_tables is not None:
            self.targets.append(TableTarget(block_tables))
        self._require_apart()
        self._gate = Gate()

    def forget(self) -> None:
        """Make the next `fill` write all of `block_tables`, because something else wrote to it."""
        for target in self.targets:
            target.forget()

    def are_of_group(self) -> bool:
        """Return whether the buffers include an array whose contents differ between layer groups."""
        for target in self.targets:
            if target.is_of_group():
                return True
        return False

    def _require_apart(self) -> None:
        for index, target in enumerate(self.targets):
            for other in self.targets[:index]:
                if np.may_share_memory(target.array, other.array):
                    raise InvalidArgument(f"{target.name} overlaps {other.name}; each needs separate memory")
