"""What the control plane hands to the data plane for one step."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..errors import StalePlan
from .arrays import view_i32, view_i64, zeros_i64
from .refusing import refuse_copy, refuse_pickle
from .sequences.block_table import BlockTable
from .sequences.table import SequenceTable
from .store import transfers as moves
from .store.transfers import Transfers

SCHEDULED: Final[i64] = 0
NO_BLOCKS: Final[i64] = 1
WAITS_FOR_PREFIX: Final[i64] = 2


class Batch:
    """The sequences of a step, as a plan remembers them, and the version of the cache in which it was made."""

    def __init__(
        self, sequences: SequenceTable, rows: vec[i64], starts: vec[i64], scheduled: vec[i64], statuses: vec[i64]
    ) -> None:
        self.sequences = sequences
        self.version: i64 = sequences.version
        self.rows = rows
        self.starts = starts
        self.scheduled = scheduled
        self.statuses = statuses

    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence after the step."""
        return (view_i64(self.starts) + view_i64(self.scheduled)).astype(np.int32)

    def require_fresh(self) -> None:
        """Raise `StalePlan` once the cache has changed."""
        if self.sequences.version != self.version:
            raise StalePlan(
                "the cache has changed since this plan was made: by a later call, or by a free that waited for the "
                "call that made it; reserve again, but carry out its copies and swaps first: they can still be read"
            )


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
        raise refuse_pickle("a plan", "send its arrays")

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
        """The block ids of each sequence, int32 (B, most blocks of one), padded with the null block 0.

        A view of the live table when the rows are adjacent and ascending, else a copy.
        """
        self._batch.require_fresh()
        table = whole_table(self._table)
        widest = self._widest()
        first = self._first_of_adjacent()
        if first >= 0:
            tables = table[int(first) : int(first) + len(self._batch.rows), : int(widest)]
        else:
            tables = table[view_i64(self._batch.rows), : int(widest)]
        self._batch.require_fresh()
        return tables

    def _widest(self) -> i64:
        num_blocks = self._table.num_blocks
        widest: i64 = 0
        for row in self._batch.rows:
            widest = max(widest, num_blocks[row])
        return widest

    def _first_of_adjacent(self) -> i64:
        """The first row when all are adjacent and ascending, else -1."""
        rows = self._batch.rows
        for index in range(i64(len(rows))):
            if rows[index] != rows[0] + index:
                return -1
        return rows[0] if len(rows) > 0 else -1

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
        # The table is live, and making arrays can run a finaliser that frees a sequence.
        self._batch.require_fresh()
        return indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Tokens in the last block of each sequence, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        lengths = self._batch.seq_lens().astype(np.int64)
        before_last: npt.NDArray[np.int64] = np.maximum(self._num_pages() - 1, 0) * self.block_size
        return (lengths - before_last).astype(np.int32)

    def _num_pages(self) -> npt.NDArray[np.int64]:
        return -(-self._batch.seq_lens().astype(np.int64) // self.block_size)


class SwapPlan:
    """Blocks to move between the pool and the CPU pool now, before the next step: swap_outs first, then swap_ins.

    swap_outs save what sequences leave behind, or what the pool evicted; swap_ins bring back sequences, or what a
    prompt hit in the CPU pool.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def __copy__(self) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __deepcopy__(self, memo: object) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __reduce__(self) -> str:
        raise refuse_pickle("a plan", "send its arrays")

    @property
    def swap_outs(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2) as (block, CPU block)."""
        return moves.pairs(self._transfers.swap_outs)

    @property
    def swap_out_groups(self) -> npt.NDArray[np.int32]:
        """The layer group of each swap_out, int32 (n,)."""
        return moves.groups(self._transfers.swap_outs)

    @property
    def swap_ins(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2) as (CPU block, block)."""
        return moves.pairs(self._transfers.swap_ins)

    @property
    def swap_in_groups(self) -> npt.NDArray[np.int32]:
        """The layer group of each swap_in, int32 (n,)."""
        return moves.groups(self._transfers.swap_ins)


class StepPlan(SwapPlan):
    """The slots, tables and block moves of a batch of B sequences that compute T new tokens in all.

    Everything is in the order of the sequences given to `reserve`. Carry out `swap_outs`, `swap_ins` and `copies`, in
    this order, then write the new keys and values to `slot_mapping`, then read by `block_tables` or by
    `indptr`/`indices`/`last_page_len`. With several layer groups, `groups` has the tables and slots of each; those
    named here are the first group's.

    The arrays that follow from block tables are made when asked for, from the live rows, and may be asked for until
    the cache changes; later they raise `StalePlan`.

    slots: the first group's, or none for them to be made when asked for.
    """

    def __init__(self, tables: list[BlockTable], batch: Batch, slots: vec[i64], transfers: Transfers) -> None:
        super().__init__(transfers)
        self._tables = tables
        self._batch = batch
        self._slots = slots
        #: How many of them count; fewer when sequences did not fit.
        self._num_slots: i64 = len(slots)

    @property
    def groups(self) -> list[GroupPlan]:
        """Tables and slots of each layer group, in the order of `CacheConfig.groups`."""
        return [GroupPlan(table, self._batch) for table in self._tables]

    def _first(self) -> GroupPlan:
        return GroupPlan(self._tables[0], self._batch)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Each sequence's row in `KVCacheManager.block_table`, int64 (B,)."""
        return view_i64(self._batch.rows)

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """What became of each sequence, uint8 (B,): values of `SeqStatus`."""
        return view_i64(self._batch.statuses).astype(np.uint8)

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Which sequences have their slots, bool (B,)."""
        fits: npt.NDArray[np.bool_] = view_i64(self._batch.statuses) == SCHEDULED
        return fits

    @property
    def all_fit(self) -> bool:
        """Whether every sequence has its slots."""
        return bool(self.fits.all())

    @property
    def num_scheduled(self) -> npt.NDArray[np.int64]:
        """New tokens of each sequence, int64 (B,); 0 where it did not fit."""
        return view_i64(self._batch.scheduled)

    @property
    def num_computed(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence whose keys and values are there before the step, int32 (B,)."""
        return view_i64(self._batch.starts).astype(np.int32)

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Tokens of each sequence after the step, int32 (B,)."""
        return self._batch.seq_lens()

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """Where each sequence's new tokens begin among all T, int32 (B + 1,)."""
        return offsets(view_i64(self._batch.scheduled))

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Where each new token's keys and values go: block_id * block_size + offset, int64 (T,)."""
        self._batch.require_fresh()
        if self._num_slots == 0:
            return self._first().slot_mapping
        return view_i64(self._slots)[: int(self._num_slots)]

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Blocks to copy before anything is written, int32 (n, 2) as (from, to)."""
        return moves.pairs(self._transfers.copies)

    @property
    def copy_groups(self) -> npt.NDArray[np.int32]:
        """The layer group of each copy, int32 (n,): its layers' blocks are to be copied, no others' need be."""
        return moves.groups(self._transfers.copies)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """The block ids of each sequence, int32 (B, most blocks of one); see `GroupPlan.block_tables`."""
        return self._first().block_tables

    @property
    def indptr(self) -> npt.NDArray[np.int32]:
        """Where each sequence's blocks begin in `indices`, int32 (B + 1,) (FlashInfer)."""
        return self._first().indptr

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """The block ids that hold `seq_lens` tokens of each sequence, one after another, int32 (FlashInfer)."""
        return self._first().indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Tokens in the last block of each sequence, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        return self._first().last_page_len


def offsets(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Where each of `counts` items begins, int32 (n + 1,)."""
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def whole_table(table: BlockTable) -> npt.NDArray[np.int32]:
    """All rows, int32 (max_num_seqs, width), read-only, live."""
    return view_i32(table.blocks).reshape(int(table.max_num_seqs), int(table.width))
