"""What the control plane hands to the data plane, as arrays: the plan of a step, of its layer groups, of a swap."""

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
    """Blocks to move between the pool and the CPU pool now, before the next step: swap_outs first, then swap_ins.

    swap_outs save what sequences leave behind, or what the pool evicted; swap_ins bring back sequences, or what a
    prompt hit in the CPU pool.
    """

    def __init__(self, tables: list[BlockTable], transfers: Transfers) -> None:
        #: Of the cache whose plan it is, one for each layer group.
        self._tables = tables
        self._transfers = transfers

    def __repr__(self) -> str:
        return f"<SwapPlan: {len(self.swap_outs)} swap_outs, {len(self.swap_ins)} swap_ins>"

    def __copy__(self) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __deepcopy__(self, memo: object) -> "SwapPlan":
        raise refuse_copy("a plan", "copy its arrays")

    def __reduce__(self) -> str:
        raise refuse_pickle("a plan", "send it by a PlanSender")

    @property
    def swap_outs(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2) as (block, CPU block)."""
        return moves.pairs(self._transfers.swap_outs)

    @property
    def swap_out_groups(self) -> npt.NDArray[np.int32]:
        """Return the layer group of each swap_out, int32 (n,)."""
        return moves.groups(self._transfers.swap_outs)

    @property
    def swap_ins(self) -> npt.NDArray[np.int32]:
        """int32 (n, 2) as (CPU block, block)."""
        return moves.pairs(self._transfers.swap_ins)

    @property
    def swap_in_groups(self) -> npt.NDArray[np.int32]:
        """Return the layer group of each swap_in, int32 (n,)."""
        return moves.groups(self._transfers.swap_ins)


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
        """Return where each new token's keys and values go: block_id * block_size + offset, int64 (T,)."""
        batch = self._batch
        batch.require_fresh()
        slots = zeros_i64(int(view_i64(batch.scheduled).sum()))
        self._table.map_slots(batch.rows, batch.starts, batch.scheduled, slots)
        # Making an array can run a finaliser that frees a sequence of this batch.
        batch.require_fresh()
        return view_i64(slots)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """Return the block ids of each sequence, int32 (B, most blocks of one), padded with the null block 0: a copy.

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
        """Return where each sequence's blocks begin in `indices`, int32 (B + 1,) (FlashInfer)."""
        return offsets(self._num_pages())

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """Return the block ids that hold `seq_lens` tokens of each sequence, one after another, int32 (FlashInfer)."""
        tables = self.block_tables
        used = np.arange(tables.shape[1]) < self._num_pages()[:, None]
        indices: npt.NDArray[np.int32] = tables[used]
        return indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Return tokens in the last block of each sequence, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        lengths = self._batch.seq_lens().astype(np.int64)
        before_last: npt.NDArray[np.int64] = np.maximum(self._num_pages() - 1, 0) * self.block_size
        return (lengths - before_last).astype(np.int32)

    def _num_pages(self) -> npt.NDArray[np.int64]:
        return -(-self._batch.seq_lens().astype(np.int64) // self.block_size)


class StateMoves:
    """A slot has the working state of one sequence, and the number of its row (`StepPlan.rows`).

    Carry out, after the plan's moves of blocks: `copies`, in their order, then `clears` and `loads`, then the step, and
    last `saves`. All but the saves are to be carried out also where the plan is not run because `reserve` was called
    again. After a step, a slot must have the state of as many tokens as `commit` says are computed.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def __repr__(self) -> str:
        moves = f"{len(self.copies)} copies, {len(self.clears)} clears, {len(self.loads)} loads"
        return f"<StateMoves: {moves}, {len(self.saves)} saves>"

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Return slots to copy, int32 (n, 2) as (from, to), of sequences that were forked."""
        return self._transfers.state_copies.array().reshape(-1, 2)

    @property
    def clears(self) -> npt.NDArray[np.int32]:
        """Return the slots of sequences that begin with nothing, int32 (n,)."""
        return self._transfers.state_clears.array()

    @property
    def loads(self) -> npt.NDArray[np.int32]:
        """Slots that a kept state goes to, int32 (n,)."""
        return self._loads()[:, 0]

    @property
    def load_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks of the pool that it is read from, int32 (n, blocks of a state), in order of its bytes."""
        return self._loads()[:, 1:]

    @property
    def saves(self) -> npt.NDArray[np.int32]:
        """Return slots whose states are to be kept, int32 (n,), one several times unless chunks are cut."""
        return self._saves()[:, 0]

    @property
    def save_boundaries(self) -> npt.NDArray[np.int32]:
        """Say after how many tokens of its sequence each is taken, int32 (n,); where chunks are cut, the step's end."""
        return self._saves()[:, 1]

    @property
    def save_blocks(self) -> npt.NDArray[np.int32]:
        """Return the blocks of the pool that each is written to, int32 (n, blocks of a state)."""
        return self._saves()[:, 2:]

    @property
    def refused(self) -> npt.NDArray[np.int32]:
        """Return where this step passes a boundary at which no state is kept, int32 (n, 2) as (slot, tokens).

        Such a state would be the first to go (`CacheConfig.state_order`): it is not worth writing.
        """
        return self._transfers.state_refused.array().reshape(-1, 2)

    def _loads(self) -> npt.NDArray[np.int32]:
        return self._transfers.state_loads.array().reshape(-1, self._transfers.state_blocks + 1)

    def _saves(self) -> npt.NDArray[np.int32]:
        return self._transfers.state_saves.array().reshape(-1, self._transfers.state_blocks + 2)


class StepPlan(SwapPlan):
    """The slots, tables and block moves of a batch of B sequences that compute T new tokens in all.

    Everything is in the order of the sequences given to `reserve`. Carry out `swap_outs`, `swap_ins` and `copies`, in
    this order, then write the new keys and values to `slot_mapping`, then read by `block_tables` or by
    `indptr`/`indices`/`last_page_len`. With several layer groups, `groups` has the tables and slots of each; those
    named here belong to no group then, and raise `InvalidArgument`.

    The arrays that follow from block tables are made when asked for, from the live rows, and may be asked for until
    the cache changes; later they raise `StalePlan`.

    slots: the first group's, or none for them to be made when asked for.
    """

    def __init__(self, tables: list[BlockTable], batch: Batch, slots: vec[i64], transfers: Transfers) -> None:
        super().__init__(tables, transfers)
        self._batch = batch
        self._slots = slots
        #: How many of them count; fewer when sequences did not fit.
        self._num_slots: i64 = len(slots)

    def __repr__(self) -> str:
        seqs = f"{int(self.fits.sum())} of {len(self.fits)} sequences, {int(self.num_scheduled.sum())} tokens"
        moved = f"{len(self.swap_outs)} swap_outs, {len(self.swap_ins)} swap_ins"
        return f"<StepPlan: {seqs}, {len(self.copies)} copies, {moved}>"

    @property
    def groups(self) -> list[GroupPlan]:
        """Tables and slots of each layer group, in the order of `CacheConfig.groups`."""
        return [GroupPlan(table, self._batch) for table in self._tables]

    @property
    def states(self) -> StateMoves:
        """Say what the step does with the states of a hybrid model; nothing without a state group."""
        return StateMoves(self._transfers)

    def _made_slots(self) -> vec[i64]:
        """Return the first group's slots, or none where they are made when asked for."""
        return self._slots if i64(len(self._slots)) == self._num_slots else self._slots[: self._num_slots]

    def _only(self, name: str) -> GroupPlan:
        """Return the plan of the only layer group. Raises `InvalidArgument` with several."""
        count = len(self._tables)
        if count > 1:
            raise InvalidArgument(f"plan.{name}: the cache has {count} layer groups; use plan.groups[number].{name}")
        return GroupPlan(self._tables[0], self._batch)

    @property
    def step(self) -> int:
        """Return the number of the step, for `commit` and `end_step`: 1, 2, ... in the order of the plans.

        0 where only one step may be in flight (`CacheConfig.max_steps_in_flight`), and in a plan read from bytes.
        """
        return int(self._batch.step)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """Return each sequence's row in `KVCacheManager.block_table`, int64 (B,)."""
        return view_i64(self._batch.rows)

    @property
    def status(self) -> npt.NDArray[np.uint8]:
        """Return what became of each sequence, uint8 (B,): values of `SeqStatus`."""
        return view_i64(self._batch.statuses).astype(np.uint8)

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        """Return which sequences have their slots, bool (B,)."""
        fits: npt.NDArray[np.bool_] = view_i64(self._batch.statuses) == SCHEDULED
        return fits

    @property
    def all_fit(self) -> bool:
        """Return whether every sequence has its slots."""
        return bool(self.fits.all())

    @property
    def num_scheduled(self) -> npt.NDArray[np.int64]:
        """New tokens of each sequence, int64 (B,); 0 where it did not fit."""
        return view_i64(self._batch.scheduled)

    @property
    def num_computed(self) -> npt.NDArray[np.int32]:
        """Return tokens of each sequence whose keys and values are there before the step, int32 (B,).

        Those of its steps that are in flight count.
        """
        return view_i64(self._batch.starts).astype(np.int32)

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """Return tokens of each sequence after the step, int32 (B,)."""
        return self._batch.seq_lens()

    @property
    def query_start_loc(self) -> npt.NDArray[np.int32]:
        """Return where each sequence's new tokens begin among all T, int32 (B + 1,)."""
        return offsets(view_i64(self._batch.scheduled))

    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """Return where each new token's keys and values go: block_id * block_size + offset, int64 (T,)."""
        only = self._only("slot_mapping")
        self._batch.require_fresh()
        if self._num_slots == 0:
            return only.slot_mapping
        return view_i64(self._slots)[: int(self._num_slots)]

    @property
    def num_tokens(self) -> int:
        """T, the tokens that the step computes, drafts included."""
        return int(self._batch.num_tokens())

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """Return the tokens of the step in the order of `slot_mapping`, int32 (T,), a copy. O(T).

        -1 stands for a token that the cache does not know: a draft of a speculation, or one that is still being sampled
        (`reserve` may go past the known tokens). Who knows it writes it there before the model reads it.
        """
        return view_i64(self._batch.input_ids(self._made_slots())).astype(np.int32)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Return the place of each of these tokens in its sequence, int64 (T,), as PyTorch's models take it. O(T)."""
        return view_i64(self._batch.positions())

    def fill(self, buffers: object, pad_to: object = None, pad_tokens_to: object = None) -> None:
        """Write the step into the caller's own arrays (`StepBuffers`), without making any. O(B + T + new blocks).

        pad_to: at least this many sequences, and as many tokens: what the graph of a decode step was captured for. A
        padded sequence has length 0 and null blocks, and begins and ends at T; a padded token has slot -1, id 0 and
        position 0. pad_tokens_to: at least this many tokens instead. What lies behind is left as it is.
        Tokens that are not known are -1, as in `input_ids`. With several layer groups, tables and slots are filled by
        each of `groups`. Raises `InvalidArgument` when an array is too small or `pad_to` below the step's own size, and
        for tables or slots of several groups; `StalePlan`; and `ConcurrentCall` when the same buffers are being filled.
        Nothing is written then.
        """
        if isinstance(buffers, StepBuffers) and not (buffers._block_tables is None and buffers._slot_mapping is None):
            self._only("fill(buffers)")
        fill_buffers(buffers, self._batch, self._tables[0], self._made_slots(), pad_to, pad_tokens_to)

    @property
    def copies(self) -> npt.NDArray[np.int32]:
        """Blocks to copy before anything is written, int32 (n, 2) as (from, to)."""
        return moves.pairs(self._transfers.copies)

    @property
    def copy_groups(self) -> npt.NDArray[np.int32]:
        """Return the layer group of each copy, int32 (n,): its layers' blocks are to be copied, no others' need be."""
        return moves.groups(self._transfers.copies)

    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """Return the block ids of each sequence, int32 (B, most blocks of one); see `GroupPlan.block_tables`."""
        return self._only("block_tables").block_tables

    @property
    def indptr(self) -> npt.NDArray[np.int32]:
        """Return where each sequence's blocks begin in `indices`, int32 (B + 1,) (FlashInfer)."""
        return self._only("indptr").indptr

    @property
    def indices(self) -> npt.NDArray[np.int32]:
        """Return the block ids that hold `seq_lens` tokens of each sequence, one after another, int32 (FlashInfer)."""
        return self._only("indices").indices

    @property
    def last_page_len(self) -> npt.NDArray[np.int32]:
        """Return tokens in the last block of each sequence, 1 to block_size, int32 (B,); 0 for none (FlashInfer)."""
        return self._only("last_page_len").last_page_len
