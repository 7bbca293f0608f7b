"""What a step's attention reads and writes in one layer group."""

import numpy as np
import numpy.typing as npt

from ..arrays import view_i64, zeros_i64
from ..face import refuse_copy, refuse_pickle
from ..sequences.block_table import BlockTable
from .batch import Batch
from .filling import fill_buffers
from .tables import offsets, rows_of_table, widest_row


class GroupPlan:
    """What a step's attention reads and writes in one layer group: the tables and slots of that group's blocks.

    In a group with a sliding window, places that lie behind the window hold the null block 0.
    Everything is made when asked for, until the cache changes; later it raises `StalePlan`.
    """

    def __init__(self, table: BlockTable, batch: Batch) -> None:
        self._table = table
        self._batch = batch

    def __copy__(self) -> "GroupPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __deepcopy__(self, memo: object) -> "GroupPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __reduce__(self) -> str:
        raise refuse_pickle("a plan", "send the whole plan by a PlanSender")

    @property
    def block_size(self) -> int:
        """Tokens a block of this group."""
        return int(self._table.block_size)

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Where each new token's keys and values go: block_id * block_size + offset, int64 (T,)."""
        batch = self._batch
        batch.require_fresh()
        slots = zeros_i64(int(view_i64(batch.scheduled).sum()))
        self._table.map_slots(batch.rows, batch.starts, batch.scheduled, slots)
        # Making an array can run a finaliser that frees a sequence of this batch.
        batch.require_fresh()
        return view_i64(slots)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """The block ids of each sequence, int32 (B, most blocks of one), padded with the null block 0: a copy.

        O(B * most blocks of one). `fill` writes what has changed since the last step instead.
        """
        batch = self._batch
        batch.require_fresh()
        tables = np.array(rows_of_table(self._table, batch.rows, widest_row(self._table, batch.rows)))
        # Making an array can run a finaliser that frees a sequence of this batch.
        batch.require_fresh()
        return tables

    def fill(self, buffers: object, pad_to: object = None, pad_tokens_to: object = None) -> None:
        """`StepPlan.fill` with the tables and slots of this group."""
        fill_buffers(buffers, self._batch, self._table, zeros_i64(0), pad_to, pad_tokens_to)

    @property
    def indptr(self) -> npt.NDArray[np.int32]:
        """Where each sequence's blocks begin in `indices`, int32 (B + 1,) (FlashInfer)."""
        return offsets(self._num_pages())

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
        lengths = self._batch.seq_lens().astype(np.int64)
        before_last: npt.NDArray[np.int64] = np.maximum(self._num_pages() - 1, 0) * self.block_size
        return (lengths - before_last).astype(np.int32)

    def _num_pages(self) -> npt.NDArray[np.int64]:
        return -(-self._batch.seq_lens().astype(np.int64) // self.block_size)
