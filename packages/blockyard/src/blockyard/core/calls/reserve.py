"""The first phase of a step: blocks and slots for the tokens to compute."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument
from ...ids import NO_ROW
from ..arrays import zeros_i64
from ..parts import Parts
from ..plan.batch import NO_BLOCKS, SCHEDULED, WAITS_FOR_PREFIX, Batch, KnownTokens
from ..plan.plans import StepPlan
from ..sequences.table import NO_TOKEN, QUIET
from ..store.transfers import Transfers
from ..tokens import store_token
from .in_flight import Steps


class ReserveCalls:
    """Reserves slots for a whole batch in one call. A sequence that does not fit is reported and stays unchanged.

    The first block that a sequence writes to is made its own before (`store/base`): forks share their last, partly
    filled block, and a truncated sequence may end inside a cached one. All blocks after it are new.
    """

    def __init__(self, parts: Parts, steps: Steps) -> None:
        self.parts = parts
        self.steps = steps
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.budget = parts.budget
        self.sequences = parts.sequences
        self.joins = parts.joins
        self.store = parts.store
        self.states = parts.states
        self.tables = parts.store.tables
        self.block_size: i64 = parts.block_size
        self.max_model_len: i64 = parts.config.max_model_len
        #: Blocks per state.
        self.state_blocks: i64 = parts.config.state_blocks
        self._slot_room = zeros_i64(0)
        self._num_slots: i64 = 0
        #: (batch position, first slot) of each sequence on the slow path.
        self._slow = zeros_i64(0)
        self._num_slow: i64 = 0
        self._served = zeros_i64(0)
        #: By row, the tokens that are computed, or will be after this step as far as known before it begins.
        self._reached = zeros_i64(int(parts.sequences.max_num_seqs))
        self._transfers = Transfers()
        self._tokens = KnownTokens(parts.sequences, parts.token_blocks.index, parts.store.tables[0])

    def reserve_known(self, rows: vec[i64]) -> StepPlan:
        """Reserve slots for all tokens that are known and not computed."""
        return self.reserve(rows, self._all_known(rows))

    def reserve(self, rows: vec[i64], counts: vec[i64]) -> StepPlan:
        """Reserve slots for the next `counts` tokens of the sequences in `rows`, for as many sequences as fit."""
        sequences = self.sequences
        self.steps.require_step()
        first = self.steps.starts(rows)
        if self.states is not None:
            self.states.cut(rows, first, counts)
        starts = self._map_ready(rows, first, counts)
        if self._num_slow > 0 and self.kv_pool.stack.has_policy:
            self._evict_ahead(rows, starts, counts)
        # The plan is made before the first change, because allocating memory can fail.
        transfers = Transfers()
        statuses = self._all_served(len(rows)) if self._num_slow == 0 else zeros_i64(len(rows))
        batch = Batch(sequences, self._tokens, rows, starts, counts, statuses)
        slots = self._slot_room[: self._num_slots] if self._num_slots <= len(self._slot_room) else zeros_i64(0)
        plan = StepPlan(self.tables, batch, slots, transfers)
        sequences.version += 1
        batch.version = sequences.version
        batch.step = self.steps.begin(rows, counts, self._slow, self._num_slow)
        if self._num_slow > 0:
            self._transfers = transfers
            plan._num_slots = self._serve_slow(rows, starts, counts, statuses, slots)
        if self.states is not None:
            self.states.save(transfers)
        self.store.finish(transfers)
        sequences.has_new_plan = True
        return plan

    def _all_known(self, rows: vec[i64]) -> vec[i64]:
        """Return, per sequence, how many tokens are known, not computed and not in a step in flight."""
        sequences = self.sequences
        counts = rows[:]
        for index in range(i64(len(rows))):
            row = rows[index]
            counts[index] = max(sequences.num_tokens[row] - sequences.num_computed[row] - sequences.num_ahead[row], 0)
        return counts

    def _all_served(self, num_seqs: int) -> vec[i64]:
        """Return the statuses of a fully served batch, which nobody may write to."""
        if len(self._served) != num_seqs:
            self._served = zeros_i64(num_seqs)
        return self._served

    def can_append(self, rows: vec[i64], counts: vec[i64]) -> bool:
        """Return whether `reserve` would serve all of these sequences now."""
        starts = self._map_ready(rows, self.steps.starts(rows), counts)
        if self.steps.is_full():
            return False
        for index in range(i64(len(rows))):
            if counts[index] > 0 and self.sequences.is_waiting(rows[index]):
                return False
        return self._all_have_room(rows, starts, counts)

    def _all_have_room(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> bool:
        """Return whether each tenant may take the blocks that its sequences lack; `ready` ones lack none."""
        slow = zeros_i64(int(self._num_slow))
        missing = zeros_i64(int(self._num_slow))
        num_slow: i64 = 0
        for position in range(self._num_slow):
            index = self._slow[2 * position]
            if counts[index] > 0:
                slow[num_slow] = rows[index]
                missing[num_slow] = self.store.num_missing(rows[index], starts[index], starts[index] + counts[index])
                num_slow += 1
        return not self.budget.shortage(slow[:num_slow], missing, self.kv_pool.queue.num_free)

    def _evict_ahead(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> None:
        """Evict for the whole step before its first change, because an eviction policy may fail.

        Only sequences that can be served evict, in order; those that are `ready` take no blocks. A copy on write may
        turn out to be unnecessary, so a sequence counts as served if it fits without the copy. Blocks for checkpoints
        are taken after those of all sequences.
        """
        if self.kv_pool.queue.knows_empty(self._num_most(counts)):
            return
        self.budget.expect_none()
        try:
            needed = self._expect_victims(rows, starts, counts)
        finally:
            self.budget.undo_plans(rows)
        self.kv_pool.evict_ahead(min(needed, self.kv_pool.queue.num_free))

    def _expect_victims(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> i64:
        """Plan the blocks of the sequences in the step, and their tenants. Return how many victims they need."""
        budget, states = self.budget, self.states
        num_to_save = zeros_i64(int(self._num_slow))
        left = self.kv_pool.queue.num_free
        needed: i64 = 0
        #: Uncached blocks that become free during the step, and are taken before others.
        freed: i64 = 0
        num_copies: i64 = 0
        if self.store.shares_at_once:
            for index in range(i64(len(rows))):
                self._reached[rows[index]] = self.sequences.num_computed[rows[index]]
        for position in range(self._num_slow):
            index = self._slow[2 * position]
            row = rows[index]
            if counts[index] == 0 or self._will_wait(row):
                continue
            tenant = budget.tenant_of_row(row)
            end = starts[index] + counts[index]
            missing = self.store.num_missing(row, starts[index], end)
            copies = self.store.num_copies(row, starts[index])
            if missing - copies > budget.room(tenant, left):
                continue
            new = max(missing - freed, 0)
            dropped: i64 = 0 if states is None else states.num_to_drop(row)
            budget.expect(tenant, new)
            budget.plan(row, missing - copies - dropped)
            needed += new
            freed = max(freed - missing, 0) + dropped
            left += dropped - missing + copies
            num_copies += copies
            if states is not None:
                num_to_save[position] = states.num_to_save(row)
            if self.sequences.num_ahead[row] == 0:
                self._reached[row] = end
        if self.state_blocks > 0:
            needed += self._expect_saves(rows, num_to_save, left - num_copies, freed)
        return needed

    def _expect_saves(self, rows: vec[i64], num_to_save: vec[i64], left: i64, freed: i64) -> i64:
        """Announce the blocks of checkpoints that there is room for. Return how many victims they need.

        Args:
            rows: rows of the batch.
            num_to_save: blocks to save, in the order of `_slow`.
            left: free blocks.
            freed: blocks that become free and are not taken before.
        """
        budget = self.budget
        needed: i64 = 0
        for position in range(self._num_slow):
            if num_to_save[position] > 0:
                row = rows[self._slow[2 * position]]
                room = max(budget.room(budget.tenant_of_row(row), left), 0)
                fits = min(num_to_save[position], room - room % self.state_blocks)
                new = max(fits - freed, 0)
                budget.expect(budget.tenant_of_row(row), new)
                budget.plan(row, fits)
                needed += new
                freed = max(freed - fits, 0)
                left -= fits
        return needed

    def _num_most(self, counts: vec[i64]) -> i64:
        """Return an upper bound of the blocks that the sequences of the slow path need. O(these sequences)."""
        num_tokens: i64 = 0
        for position in range(self._num_slow):
            num_tokens += counts[self._slow[2 * position]]
        return self.store.num_most(self._num_slow, num_tokens)

    def _will_wait(self, row: i64) -> bool:
        """Return whether the row waits for a sequence that is not in this step, or not served before it."""
        sequences = self.sequences
        if not sequences.is_waiting(row):
            return False
        owner = sequences.waits_on[row]
        return not sequences.in_batch(owner) or self._reached[owner] < sequences.waits_for[row]

    def _map_ready(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> vec[i64]:
        """Refuse invalid counts, and write the slots of all `ready` sequences. Return the start of each sequence.

        The slots are written to `_slot_room`, which is not visible yet, with gaps for the other sequences (`_slow`). A
        step with more tokens than it has room for contains prompts; its slots are made when the plan is read.

        Args:
            rows: rows of the batch.
            first: by row, the position of its next token.
            counts: tokens of each sequence.
        """
        self.store.require_swapped_in(rows, "reserve")
        sequences = self.sequences
        num_seqs = i64(len(rows))
        self._make_room(num_seqs)
        starts = rows[:]
        slow = self._slow
        slots = self._slot_room
        ready = sequences.ready
        table = self.tables[0]
        tail = table.tail
        tail_at = table.tail_at
        block_size = table.block_size
        limit = self.max_model_len
        num_slow: i64 = 0
        total: i64 = 0
        for index in range(num_seqs):
            row = rows[index]
            count = counts[index]
            start = first[row]
            if count < 0 or count > limit - start:
                self._refuse(index, row, count, start)
            starts[index] = start
            if count == 1 and start < ready[row] and total < len(slots):
                # A decoded token is written to the last block, which is found without a division.
                begin = tail_at[row]
                if start >= begin:
                    slots[total] = tail[row] * block_size + start - begin
                else:
                    slots[total] = table.slot_of(row, start)
            else:
                slow[2 * num_slow] = index
                slow[2 * num_slow + 1] = total
                num_slow += 1
            total += count
        self._num_slow = num_slow
        self._num_slots = total
        return starts

    def _make_room(self, num_seqs: i64) -> None:
        """Make room for the slots of a decode step."""
        if 2 * num_seqs > len(self._slow):
            self._slow = zeros_i64(int(4 * num_seqs))
        if num_seqs > len(self._slot_room):
            self._slot_room = zeros_i64(int(2 * num_seqs))

    def _refuse(self, index: i64, row: i64, count: i64, start: i64) -> None:
        limit = self.max_model_len
        ahead = " or in flight" if self.sequences.num_ahead[row] > 0 else ""
        raise InvalidArgument(
            f"num_new_tokens[{index}] is {count} for {self.sequences.name(row)}; "
            f"it must be from 0 to {limit - start}: {start} tokens are computed{ahead}, max_model_len is {limit}"
        )

    def _serve_slow(
        self, rows: vec[i64], starts: vec[i64], counts: vec[i64], statuses: vec[i64], slots: vec[i64]
    ) -> i64:
        """Give the sequences of the slow path blocks and slots, in order; set the count of those that do not fit to 0.

        Return how many slots are written: all, or 0 if the plan makes them on access.
        """
        sequences, steps = self.sequences, self.steps
        table = self.tables[0]
        has_ended = sequences.num_ended > 0
        maps = self._num_slots == len(slots)
        failed = False
        for position in range(self._num_slow):
            index = self._slow[2 * position]
            row = rows[index]
            end = starts[index] + counts[index]
            sequences.reserved_at[row] = sequences.version
            if has_ended and sequences.ended_by[row] != 0 and sequences.ended_at[row] <= steps.num_landed():
                sequences.forget_end(row)
            status = SCHEDULED
            if sequences.ready[row] == 0 or end > sequences.ready[row]:
                status = self._grow(row, starts[index], end)
            if status != SCHEDULED:
                statuses[index] = status
                counts[index] = 0
                steps.refuse(row)
                failed = True
                continue
            steps.open(row, counts[index])
            if maps and not failed:
                table.map_run(row, starts[index], end, slots, self._slow[2 * position + 1])
        if not maps:
            return 0
        return table.map_slots(rows, starts, counts, slots) if failed else self._num_slots

    def _grow(self, row: i64, start: i64, end: i64) -> i64:
        """Give a sequence the blocks to write tokens `start` to `end`. Return its status."""
        if end == start:
            return SCHEDULED
        if self._lacks_prefix(row):
            return WAITS_FOR_PREFIX
        sequences = self.sequences
        if not self.store.grow(row, start, end, self._transfers):
            return NO_BLOCKS
        self._store_pending(row)
        if sequences.copy_from[row] and not self.store.has_states:
            self._copy_beginning(row, start // self.block_size)
        if sequences.waits_on[row] == NO_ROW and sequences.pending_token[row] == NO_TOKEN:
            sequences.alert[row] = QUIET
            self.store.note_ready(row)
        return SCHEDULED

    def _lacks_prefix(self, row: i64) -> bool:
        """Return whether shared blocks of the row are neither computed nor computed in this step."""
        sequences = self.sequences
        owner = sequences.waits_on[row]
        if owner == NO_ROW:
            return False
        if not sequences.is_waiting(row):
            self.joins.settle(row)
            return False
        return self.steps.num_reached(owner) < sequences.waits_for[row]

    def _copy_beginning(self, row: i64, position: i64) -> None:
        """Copy the first tokens of a block, because the hit ended inside it, from another block."""
        self._transfers.hold_sources(self.sequences.copy_from[row])
        for group, source in enumerate(self.sequences.copy_from[row]):
            self._transfers.copy(source, int(self.tables[group].block_at(row, position)), group)
        self.sequences.copy_from[row] = []

    def _store_pending(self, row: i64) -> None:
        """Move the token that waits in the row to its block, if the row has that block now."""
        token = self.sequences.pending_token[row]
        position = self.sequences.num_tokens[row] - 1
        logical = position // self.block_size
        if token != NO_TOKEN and logical < self.sequences.num_blocks[row]:
            index = self.token_blocks.index
            start = index.rows.start_of(self.sequences.block_at(row, logical))
            store_token(index.rows.words, start, position - logical * self.block_size, token)
            self.sequences.pending_token[row] = NO_TOKEN
