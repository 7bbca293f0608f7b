"""What the control plane hands to the data plane for one step."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..errors import StalePlan
from .arrays import view_i32, view_i64
from .sequences import SequenceTable

SCHEDULED: Final[i64] = 0
NO_BLOCKS: Final[i64] = 1
WAITS_FOR_PREFIX: Final[i64] = 2


class StepPlan:
    """The slots, tables and copies of a batch of B sequences that compute T new tokens in all.

    Everything is in the order of the sequences given to `reserve`. Carry out `copies` first, then write the new keys
    and values to `slot_mapping`, then read by `block_tables` or by `indptr`/`indices`/`last_page_len`.

    The arrays that follow from block tables are made when asked for, from the live rows, and may be asked for until
    the cache changes; later they raise `StalePlan`.
    """

    def __init__(
        self,
        sequences: SequenceTable,
        block_size: int,
        rows: vec[i64],
        starts: vec[i64],
        scheduled: vec[i64],
        statuses: vec[i64],
        slots: vec[i64],
        copied: list[int],
    ) -> None:
        self._sequences = sequences
        self._version: i64 = sequences.version
        self._block_size = block_size
        self._rows = rows
        self._starts = starts
        self._scheduled = scheduled
        self._statuses = statuses
        self._slots = slots
        self._copied = copied

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Each sequence's row in `KVCacheManager.block_table`, int64 (B,)."""
        return view_i64(self._rows)

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """What became of each sequence, uint8 (B,): values of `SeqStatus`."""
        return view_i64(self._statuses).astype(np.uint8)

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Which sequences have their slots, bool (B,)."""
        fits: npt.NDArray[np.bool_] = view_i64(self._statuses) == SCHEDULED
        return fits

    @property
    def all_fit(self) -> bool:
        """Whether every sequence has its slots."""
        return bool(self.fits.all())

    @property
    def num_scheduled(self) -> npt.NDArray[np.int64]:
        """New tokens of each sequence, int64 (B,); 0 where it did not fit."""
        return view_i64(self._scheduled)

    @property
    def num_computed(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence whose keys and values are there before the step, int32 (B,)."""
        return view_i64(self._starts).astype(np.int32)

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence after the step, int32 (B,)."""
        return (view_i64(self._starts) + view_i64(self._scheduled)).astype(np.int32)

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """Where each sequence's new tokens begin among all T, int32 (B + 1,)."""
        return _offsets(view_i64(self._scheduled))

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Where each new token's keys and values go: block_id * block_size + offset, int64 (T,)."""
        return view_i64(self._slots)

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Blocks to copy before anything is written, int32 (n, 2) as (from, to)."""
        return np.array(self._copied, dtype=np.int32).reshape(-1, 2)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """The block ids of each sequence, int32 (B, most blocks of one), padded with the null block 0.

        A view of the live table when the rows are adjacent and ascending, else a copy.
        """
        self._require_fresh()
        table = _table(self._sequences)
        widest = self._widest()
        first = self._first_of_adjacent()
        if first >= 0:
            return table[int(first) : int(first) + len(self._rows), : int(widest)]
        return table[self.rows, : int(widest)]

    def _widest(self) -> i64:
        num_blocks = self._sequences.num_blocks
        widest: i64 = 0
        for row in self._rows:
            widest = max(widest, num_blocks[row])
        return widest

    def _first_of_adjacent(self) -> i64:
        """The first row when all are adjacent and ascending, else -1."""
        rows = self._rows
        for index in range(i64(len(rows))):
            if rows[index] != rows[0] + index:
                return -1
        return rows[0] if len(rows) > 0 else -1

    @property
    def indptr(self) -> npt.NDArray[np.int32]:
        """Where each sequence's blocks begin in `indices`, int32 (B + 1,) (FlashInfer)."""
        return _offsets(self._num_pages())

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """The block ids that hold `seq_lens` tokens of each sequence, one after another, int32 (FlashInfer)."""
        tables = self.block_tables
        used = np.arange(tables.shape[1]) < self._num_pages()[:, None]
        indices: npt.NDArray[np.int32] = tables[used]
        return indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Tokens in the last block of each sequence, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        lengths = self.seq_lens.astype(np.int64)
        before_last: npt.NDArray[np.int64] = np.maximum(self._num_pages() - 1, 0) * self._block_size
        return (lengths - before_last).astype(np.int32)

    def _num_pages(self) -> npt.NDArray[np.int64]:
        return -(-self.seq_lens.astype(np.int64) // self._block_size)

    def _require_fresh(self) -> None:
        if self._sequences.version != self._version:
            raise StalePlan("the cache has changed since this plan was made; read its tables before the next call")


def _offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _table(sequences: SequenceTable) -> npt.NDArray[np.int32]:
    return view_i32(sequences.blocks).reshape(int(sequences.max_num_seqs), int(sequences.width))
