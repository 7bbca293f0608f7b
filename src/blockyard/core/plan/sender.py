"""Plans as bytes, for the ranks that carry them out."""

import numpy as np
from librt.vecs import vec
from mypy_extensions import i64

from ...arguments import shown
from ...errors import InvalidArgument
from ..arrays import grown_i64, view_i64, zeros_i64
from ..gate import Gate
from ..refusing import refuse_copy, refuse_pickle
from ..sequences.block_table import BlockTable
from ..store.transfers import Transfers
from .batch import SCHEDULED, Batch
from .message import DIGEST_AT, HEADER_BYTES, NO_DIGEST, STEP, SWAP, Shape, sealed
from .seen_rows import SeenRows
from .step_plan import StepPlan
from .swap_plan import SwapPlan


class PlanSender:
    """One end of a chain of plans: makes the bytes that every rank's `PlanReceiver` reads, all of them, in this order.

    A message has of the block tables what has changed since the one before. It names its step, and the digest of all
    messages before it, so a rank that has missed, doubled or altered one says so at the next, by name. The digest finds
    errors, not forgeries: an 8-byte BLAKE2b without a key.

    config: the `CacheConfig` of the cache whose plans these are. Raises `InvalidArgument` for anything else.
    """

    def __init__(self, config: object) -> None:
        self._shape = Shape(config)
        self._seen = [SeenRows(self._shape.max_num_seqs, width) for width in self._shape.widths]
        #: Of the cache whose plans these are, once the first was taken.
        self._tables: list[BlockTable] = []
        self._words = zeros_i64(0)
        self._num_words: i64 = 0
        self._num_steps = 0
        self._digest = NO_DIGEST
        self._gate = Gate()

    @property
    def num_steps(self) -> int:
        """Messages so far. O(1)."""
        return self._num_steps

    @property
    def digest(self) -> str:
        """The digest of all messages so far, 16 hexadecimal digits. O(1)."""
        return self._digest.hex()

    def to_bytes(self, plan: object, moves_only: object = False) -> bytes:
        """The next message of the chain: a `StepPlan` or a `SwapPlan`. O(B + T + new blocks), 16 bytes a decoded token.

        moves_only: leave out the sequences, of a step plan that is not run because `reserve` was called again; its
        copies and swaps are to be carried out all the same, and this works though the plan is stale.
        Raises `StalePlan`, and `InvalidArgument` for a plan of a cache of another shape, or of another cache than the
        plans before, and `ConcurrentCall`; the chain goes on as if this call had not been.
        """
        if not isinstance(moves_only, bool):
            raise InvalidArgument(f"moves_only is {shown(moves_only)}; it must be True or False")
        self._gate.enter("to_bytes")
        is_whole = False
        try:
            message = self._message(plan, moves_only)
            is_whole = True
        finally:
            if not is_whole:
                # Rows may have been noted that no message told of.
                for seen in self._seen:
                    seen.forget()
            self._gate.leave()
        self._num_steps += 1
        self._digest = message[DIGEST_AT:HEADER_BYTES]
        return message

    def _message(self, plan: object, moves_only: bool) -> bytes:
        step = self._num_steps + 1
        if not isinstance(plan, SwapPlan):
            raise InvalidArgument(f"plan is {shown(plan)}; a StepPlan or a SwapPlan is needed")
        self._require_own(plan._tables)
        if isinstance(plan, StepPlan):
            message = sealed(STEP, step, self._digest, self._step_body(plan, moves_only))
        else:
            message = sealed(SWAP, step, self._digest, self._swap_body(plan._transfers))
        self._tables = plan._tables
        return message

    def _swap_body(self, transfers: Transfers) -> bytes:
        self._begin(0, 0, 0, transfers)
        self._put_moves(transfers)
        return self._body()

    def _step_body(self, plan: StepPlan, moves_only: bool) -> bytes:
        batch = plan._batch
        if not moves_only:
            batch.require_fresh()
        num_seqs = i64(0) if moves_only else i64(len(batch.rows))
        self._begin(num_seqs, i64(0) if moves_only else batch.num_tokens(), len(plan._tables), plan._transfers)
        for table in plan._tables:
            self._put_all([int(table.block_size), int(table.width), 0, 0])
        self._put_moves(plan._transfers)
        if not moves_only:
            self._put_batch(batch, plan._made_slots())
            for group in range(len(plan._tables)):
                self._put_changes(group, plan._tables[group], batch.rows)
            batch.require_fresh()
        return self._body()

    def _require_own(self, tables: list[BlockTable]) -> None:
        shape = self._shape
        sizes = [int(table.block_size) for table in tables]
        widths = [int(table.width) for table in tables]
        if sizes != shape.block_sizes or widths != shape.widths or tables[0].max_num_seqs != shape.max_num_seqs:
            raise InvalidArgument(
                f"plan has block sizes {sizes}, tables {widths} blocks wide and {tables[0].max_num_seqs} sequences; "
                f"the config of this sender says {shape.block_sizes}, {shape.widths} and {shape.max_num_seqs}"
            )
        if self._tables and self._tables[0] is not tables[0]:
            raise InvalidArgument("plan is of another cache than the plans before it; a sender is for one cache")

    # The words of the body.

    def _begin(self, num_seqs: i64, num_tokens: i64, num_groups: int, transfers: Transfers) -> None:
        self._num_words = 0
        counts = [num_groups, self._shape.max_num_seqs, int(num_seqs), int(num_tokens), 0]
        moves = (transfers.swap_outs, transfers.swap_ins, transfers.copies)
        self._put_all(counts + [len(triples) // 3 for triples in moves])

    def _put_moves(self, transfers: Transfers) -> None:
        self._put_all(transfers.swap_outs)
        self._put_all(transfers.swap_ins)
        self._put_all(transfers.copies)

    def _put_batch(self, batch: Batch, slots: vec[i64]) -> None:
        num_seqs = i64(len(batch.rows))
        num_tokens = batch.num_tokens()
        words = self._room(3 * num_seqs + num_tokens)
        first = self._num_words
        for items in (batch.rows, batch.starts, batch.scheduled):
            for index in range(num_seqs):
                words[first + index] = items[index]
            first += num_seqs
        self._num_words = first
        self._put_unserved(batch.statuses)
        ids = zeros_i64(int(num_tokens))
        batch.tokens.write(batch.rows, batch.starts, batch.scheduled, slots, ids)
        words = self._room(num_tokens)
        first = self._num_words
        for index in range(num_tokens):
            words[first + index] = ids[index]
        self._num_words = first + num_tokens

    def _put_unserved(self, statuses: vec[i64]) -> None:
        for index in range(i64(len(statuses))):
            if statuses[index] != SCHEDULED:
                self._put_all([int(index), int(statuses[index])])
                self._words[4] += 1

    def _put_changes(self, group: int, table: BlockTable, rows: vec[i64]) -> None:
        """The rows of one group that have changed, then their block ids."""
        seen = self._seen[group]
        changed: list[int] = []
        for index in range(i64(len(rows))):
            row = rows[index]
            is_new = seen.is_new(row, table, row)
            if is_new or seen.num_blocks[row] != table.num_blocks[row] or seen.num_null[row] != table.num_null[row]:
                first = i64(0) if is_new else seen.num_blocks[row]
                changed += (int(index), int(first), int(table.num_blocks[row]), int(table.num_null[row]))
        self._put_all(changed)
        num_ids = self._num_words
        for position in range(0, len(changed), 4):
            row = rows[changed[position]]
            self._put_blocks(table, row, changed[position + 1])
            seen.note(row, table, row)
        at = 8 + 4 * i64(group)
        self._words[at + 2] = len(changed) // 4
        self._words[at + 3] = self._num_words - num_ids

    def _put_blocks(self, table: BlockTable, row: i64, first: i64) -> None:
        count = table.num_blocks[row] - first
        words = self._room(count)
        source = row * table.width + first
        blocks = table.blocks
        end = self._num_words
        for index in range(count):
            words[end + index] = i64(blocks[source + index])
        self._num_words = end + count

    def _put_all(self, items: list[int]) -> None:
        words = self._room(len(items))
        end = self._num_words
        for item in items:
            words[end] = item
            end += 1
        self._num_words = end

    def _room(self, count: i64) -> vec[i64]:
        needed = self._num_words + count
        if needed > len(self._words):
            self._words = grown_i64(self._words, int(2 * needed))
        return self._words

    def _body(self) -> bytes:
        return view_i64(self._words)[: int(self._num_words)].astype(np.dtype("<i4")).tobytes()

    def __copy__(self) -> "PlanSender":
        raise refuse_copy("a PlanSender", "make another one, and other receivers")

    def __deepcopy__(self, memo: object) -> "PlanSender":
        raise refuse_copy("a PlanSender", "make another one, and other receivers")

    def __reduce__(self) -> str:
        raise refuse_pickle("a PlanSender", "make one where the cache is")
