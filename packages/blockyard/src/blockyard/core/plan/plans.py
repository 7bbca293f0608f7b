"""Plans of a step, of its layer groups and of swaps, as arrays."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument
from ..arrays import view_i64, zeros_i64
from ..face import refuse_copy, refuse_pickle
from ..sequences.block_table import BlockTable
from ..store import transfers as moves
from ..store.transfers import Transfers
from .batch import SCHEDULED, Batch
from .buffers import StepBuffers
from .filling import fill_buffers
from .tables import offsets, rows_of_table, widest_row


class SwapPlan:
    """Moves between the pool and the CPU pool to carry out before the next step: swap_outs first, then swap_ins.

    swap_outs save blocks of swapped-out sequences or evicted blocks; swap_ins restore sequences, or blocks that a
    prompt hit in the CPU pool.
    """

    def __init__(self, tables: list[BlockTable], transfers: Transfers) -> None:
        #: Tables of the cache, one per layer group.
        self._tables = tables
        self._transfers = transfers

    def __repr__(self) -> str:
        return f"<SwapPlan: {len(self.swap_outs)} swap_outs, {len(self.swap_ins)} swap_ins>"

    def __copy__(self) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __deepcopy__(self, memo: object) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __reduce__(self) -> str:
        raise refuse_pickle("a plan", "send it with a PlanSender")

    @property
    def swap_outs(self) -> npt.NDArray[np.int32]:
        """Return the pairs (block, CPU block), int32 (n, 2)."""
        return moves.pairs(self._transfers.swap_outs)

    @property
    def swap_out_groups(self) -> npt.NDArray[np.int32]:
        """Return the layer group of each swap_out, int32 (n,)."""
        return moves.groups(self._transfers.swap_outs)

    @property
    def swap_ins(self) -> npt.NDArray[np.int32]:
        """Return the pairs (CPU block, block), int32 (n, 2)."""
        return moves.pairs(self._transfers.swap_ins)

    @property
    def swap_in_groups(self) -> npt.NDArray[np.int32]:
        """Return the layer group of each swap_in, int32 (n,)."""
        return moves.groups(self._transfers.swap_ins)


class GroupPlan:
    """Block tables and slots of one layer group in a step.

    In a group with a sliding window, positions before the window have the null block 0. Arrays are made on access; once
    the cache has changed, access raises `StalePlan`.
    """

    def __init__(self, table: BlockTable, batch: Batch, slots: vec[i64]) -> None:
        self._table = table
        self._batch = batch
        #: Slots of all tokens; empty if they are made on access.
        self._slots = slots

    def __copy__(self) -> "GroupPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __deepcopy__(self, memo: object) -> "GroupPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __reduce__(self) -> str:
        raise refuse_pickle("a plan", "send the whole plan with a PlanSender")

    @property
    def block_size(self) -> int:
        """Return the tokens per block of this group."""
        return int(self._table.block_size)

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Return the slot of each new token, block_id * block_size + offset, int64 (T,)."""
        batch = self._batch
        batch.require_fresh()
        slots = zeros_i64(int(view_i64(batch.scheduled).sum()))
        self._table.map_slots(batch.rows, batch.starts, batch.scheduled, slots)
        # Making an array can run a finaliser that frees a sequence of this batch.
        batch.require_fresh()
        return view_i64(slots)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """Return the block ids of each sequence, int32 (B, most blocks), padded with the null block 0, as a copy.

        O(B * most blocks). `fill` writes only the changes since the last step.
        """
        batch = self._batch
        batch.require_fresh()
        tables = np.array(rows_of_table(self._table, batch.rows, widest_row(self._table, batch.rows)))
        # Making an array can run a finaliser that frees a sequence of this batch.
        batch.require_fresh()
        return tables

    def fill(self, buffers: object, pad_to: object = None, pad_tokens_to: object = None) -> None:
        """Write the tables and slots of this group to `buffers`, as `StepPlan.fill` does."""
        fill_buffers(buffers, self._batch, self._table, self._slots, pad_to, pad_tokens_to)

    @property
    def indptr(self) -> npt.NDArray[np.int32]:
        """Return the position in `indices` of each sequence's first block, int32 (B + 1,) (FlashInfer)."""
        return offsets(self._num_pages())

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """Return the block ids for `seq_lens` tokens of each sequence, concatenated, int32 (FlashInfer)."""
        tables = self.block_tables
        used = np.arange(tables.shape[1]) < self._num_pages()[:, None]
        indices: npt.NDArray[np.int32] = tables[used]
        return indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Return the tokens in each sequence's last block, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        lengths = self._batch.seq_lens().astype(np.int64)
        before_last: npt.NDArray[np.int64] = np.maximum(self._num_pages() - 1, 0) * self.block_size
        return (lengths - before_last).astype(np.int32)

    def _num_pages(self) -> npt.NDArray[np.int64]:
        return -(-self._batch.seq_lens().astype(np.int64) // self.block_size)


class StateMoves:
    """Operations of a step on the slots of working states. A sequence's slot is its row (`StepPlan.rows`).

    After the plan's moves of blocks, carry out `copies` in order, then `clears` and `loads`, then the step, and last
    `saves`. If the plan is not run because `reserve` was called again, carry out all but the saves. After a step, a
    slot must hold the state after as many tokens as `commit` counts as computed.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def __repr__(self) -> str:
        moves = f"{len(self.copies)} copies, {len(self.clears)} clears, {len(self.loads)} loads"
        return f"<StateMoves: {moves}, {len(self.saves)} saves>"

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Return the slots to copy for forked sequences, int32 (n, 2) as (from, to)."""
        return self._transfers.state_copies.array().reshape(-1, 2)

    @property
    def clears(self) -> npt.NDArray[np.int32]:
        """Return the slots to clear, int32 (n,)."""
        return self._transfers.state_clears.array()

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Return the slots to load a saved state into, int32 (n,)."""
        return self._loads()[:, 0]

    @property
    def load_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks to load each slot from, int32 (n, blocks of a state), in the order of the state's bytes."""
        return self._loads()[:, 1:]

    @property
    def saves(self) -> npt.NDArray[np.int32]:
        """Return the slots whose states are to be saved, int32 (n,).

        A slot may occur several times, unless chunks are cut.
        """
        return self._saves()[:, 0]

    @property
    def save_positions(self) -> npt.NDArray[np.int32]:
        """Return for each save the number of tokens of its sequence that the state covers, int32 (n,).

        With chunks that are cut, this is the end of the step.
        """
        return self._saves()[:, 1]

    @property
    def save_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks to save each state to, int32 (n, blocks of a state)."""
        return self._saves()[:, 2:]

    @property
    def refused(self) -> npt.NDArray[np.int32]:
        """Return the checkpoint positions whose states are not saved, int32 (n, 2) as (slot, tokens).

        Such a state would be evicted first (`StateConfig.order`), so saving it is not worthwhile.
        """
        return self._transfers.state_refused.array().reshape(-1, 2)

    def _loads(self) -> npt.NDArray[np.int32]:
        return self._transfers.state_loads.array().reshape(-1, self._transfers.state_blocks + 1)

    def _saves(self) -> npt.NDArray[np.int32]:
        return self._transfers.state_saves.array().reshape(-1, self._transfers.state_blocks + 2)


class StepPlan(SwapPlan):
    """Slots, block tables and block moves for a batch of B sequences that compute T new tokens.

    All arrays are in the order of the sequences passed to `reserve`. Carry out `swap_outs`, `swap_ins` and `copies`, in
    this order, then write the new keys and values to `slot_mapping`, then read by `block_tables` or by
    `indptr`/`indices`/`last_page_len`. With several layer groups, `groups` has the tables and slots of each, and those
    of the plan itself raise `InvalidArgument`.

    Arrays that depend on block tables are made on access from live data; once the cache has changed, access raises
    `StalePlan`.
    """

    def __init__(self, tables: list[BlockTable], batch: Batch, slots: vec[i64], transfers: Transfers) -> None:
        super().__init__(tables, transfers)
        self._batch = batch
        self._slots = slots
        #: Number of valid ones; fewer if sequences did not fit.
        self._num_slots: i64 = len(slots)

    def __repr__(self) -> str:
        seqs = f"{int(self.fits.sum())} of {len(self.fits)} sequences, {int(self.num_scheduled.sum())} tokens"
        moved = f"{len(self.swap_outs)} swap_outs, {len(self.swap_ins)} swap_ins"
        return f"<StepPlan: {seqs}, {len(self.copies)} copies, {moved}>"

    @property
    def groups(self) -> list[GroupPlan]:
        """Return the tables and slots of each layer group, in the order of `CacheConfig.groups`."""
        groups = [GroupPlan(self._tables[0], self._batch, self._made_slots())]
        return groups + [GroupPlan(table, self._batch, zeros_i64(0)) for table in self._tables[1:]]

    @property
    def states(self) -> StateMoves:
        """Return the step's operations on states of a hybrid model; empty without a state group."""
        return StateMoves(self._transfers)

    def _made_slots(self) -> vec[i64]:
        """Return the slots of the first group; empty if they are computed on access."""
        return self._slots if i64(len(self._slots)) == self._num_slots else self._slots[: self._num_slots]

    def _only(self, name: str) -> GroupPlan:
        """Return the plan of the only layer group. Raises `InvalidArgument` with several."""
        count = len(self._tables)
        if count > 1:
            raise InvalidArgument(f"plan.{name}: the cache has {count} layer groups; use plan.groups[number].{name}")
        return GroupPlan(self._tables[0], self._batch, zeros_i64(0))

    @property
    def step(self) -> int:
        """Return the number of the step for `commit` and `end_step`: 1, 2, ... in the order of the plans.

        0 if only one step may be in flight (`CacheConfig.max_steps_in_flight`), and in a plan read from bytes.
        """
        return int(self._batch.step)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Return each sequence's row in `KVCacheManager.block_table`, int64 (B,)."""
        return view_i64(self._batch.rows)

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """Return the outcome of each sequence, uint8 (B,): values of `SeqStatus`."""
        return view_i64(self._batch.statuses).astype(np.uint8)

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Return which sequences got their slots, bool (B,)."""
        fits: npt.NDArray[np.bool_] = view_i64(self._batch.statuses) == SCHEDULED
        return fits

    @property
    def all_fit(self) -> bool:
        """Return whether every sequence got its slots."""
        return bool(self.fits.all())

    @property
    def num_scheduled(self) -> npt.NDArray[np.int64]:
        """Return the new tokens of each sequence, int64 (B,); 0 if it did not fit."""
        return view_i64(self._batch.scheduled)

    @property
    def num_computed(self) -> npt.NDArray[np.int32]:
        """Return the tokens of each sequence that are computed before the step, int32 (B,).

        Tokens of its steps in flight count as computed.
        """
        return view_i64(self._batch.starts).astype(np.int32)

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Return the tokens of each sequence after the step, int32 (B,)."""
        return self._batch.seq_lens()

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """Return the position of each sequence's first new token among all T, int32 (B + 1,)."""
        return offsets(view_i64(self._batch.scheduled))

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Return the slot of each new token, block_id * block_size + offset, int64 (T,)."""
        only = self._only("slot_mapping")
        self._batch.require_fresh()
        if self._num_slots == 0:
            return only.slot_mapping
        return view_i64(self._slots)[: int(self._num_slots)]

    @property
    def num_tokens(self) -> int:
        """Return T, the number of tokens that the step computes, drafts included."""
        return int(self._batch.num_tokens())

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Return the tokens of the step in the order of `slot_mapping`, int32 (T,), as a copy. O(T).

        -1 marks a token that the cache does not know: a draft, or one that is still being sampled (`reserve` may go
        past the known tokens). Fill it in before the model reads it.
        """
        return view_i64(self._batch.input_ids(self._made_slots())).astype(np.int32)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Return the position of each of these tokens in its sequence, int64 (T,), as PyTorch's models expect. O(T)."""
        return view_i64(self._batch.positions())

    def fill(self, buffers: object, pad_to: object = None, pad_tokens_to: object = None) -> None:
        """Write the step to the caller's arrays (`StepBuffers`) without allocating any. O(B + T + new blocks).

        A padded sequence has length 0 and null blocks, and begins and ends at T; a padded token has slot -1, id 0 and
        position 0. Entries after the padding are unchanged. Unknown tokens are -1, as in `input_ids`. With several
        layer groups, each of `groups` fills its tables and slots. After an error nothing is written.

        Args:
            buffers: the arrays.
            pad_to: at least this many sequences, and as many tokens: the size of a captured decode graph.
            pad_tokens_to: at least this many tokens instead.

        Raises:
            InvalidArgument: an array is too small, `pad_to` is below the step's size, or tables or slots of several
                groups are requested.
            StalePlan: the cache has changed.
            ConcurrentCall: the same buffers are being filled.
        """
        if isinstance(buffers, StepBuffers) and buffers.are_of_group():
            self._only("fill(buffers)")
        fill_buffers(buffers, self._batch, self._tables[0], self._made_slots(), pad_to, pad_tokens_to)

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Return the blocks to copy before anything is written, int32 (n, 2) as (from, to)."""
        return moves.pairs(self._transfers.copies)

    @property
    def copy_groups(self) -> npt.NDArray[np.int32]:
        """Return the layer group of each copy, int32 (n,). Only that group's layers need to be copied."""
        return moves.groups(self._transfers.copies)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """Return the block ids of each sequence, int32 (B, most blocks), padded with the null block 0, as a copy."""
        return self._only("block_tables").block_tables

    @property
    def indptr(self) -> npt.NDArray[np.int32]:
        """Return the position in `indices` of each sequence's first block, int32 (B + 1,) (FlashInfer)."""
        return self._only("indptr").indptr

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """Return the block ids for `seq_lens` tokens of each sequence, concatenated, int32 (FlashInfer)."""
        return self._only("indices").indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Return the tokens in each sequence's last block, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        return self._only("last_page_len").last_page_len
