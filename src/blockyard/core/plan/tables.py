"""Block tables as arrays."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..arrays import view_i32, view_i64
from ..sequences.block_table import BlockTable


def whole_table(table: BlockTable) -> npt.NDArray[np.int32]:
    """All rows, int32 (max_num_seqs, width), read-only, live."""
    return view_i32(table.blocks).reshape(int(table.max_num_seqs), int(table.width))


def rows_of_table(table: BlockTable, rows: vec[i64], width: i64) -> npt.NDArray[np.int32]:
    """The first `width` places of some rows, int32 (rows, width): a live view where they are adjacent, else a copy."""
    whole = whole_table(table)
    first = _first_of_adjacent(rows)
    if first >= 0:
        return whole[int(first) : int(first) + len(rows), : int(width)]
    return whole[view_i64(rows), : int(width)]


def widest_row(table: BlockTable, rows: vec[i64]) -> i64:
    """The most blocks that one of these rows has."""
    num_blocks = table.num_blocks
    widest: i64 = 0
    for row in rows:
        widest = max(widest, num_blocks[row])
    return widest


def _first_of_adjacent(rows: vec[i64]) -> i64:
    """The first row when all are adjacent and ascending, else -1."""
    if len(rows) == 0:
        return -1
    first = rows[0]
    for index in range(i64(len(rows))):
        if rows[index] != first + index:
            return -1
    return first


def offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Where each of `counts` items begins, int32 (n + 1,)."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
