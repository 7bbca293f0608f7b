"""The first phase of a step: blocks and slots for the tokens about to be computed."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import InvalidArgument
from ...ids import NO_ROW
from ..arrays import zeros_i64
from ..parts import Parts
from ..plan.batch import NO_BLOCKS, SCHEDULED, WAITS_FOR_PREFIX, Batch, KnownTokens
from ..plan.plans import StepPlan
from ..policies.layers.shares import TenantBook
from ..sequences.table import NO_TOKEN, QUIET
from ..store.transfers import Transfers
from ..tokens import store_token
from .in_flight import InFlight


class ReserveCalls:
    """Gives a whole batch its slots in one call; what does not fit is reported, and nothing changes for it.

    Before a sequence writes, the block it writes to first is made its own (`store/base`): forks share their
    last, partly filled block, and a truncated sequence may end inside a cached one. All blocks behind it are new.
    """

    def __init__(self, parts: Parts, in_flight: InFlight | None) -> None:
        self.parts = parts
        self.in_flight = in_flight
        self.token_blocks = parts.token_blocks
        self.kv_pool = parts.kv_pool
        self.sequences = parts.sequences
        self.joins = parts.joins
        self.store = parts.store
        self.states = parts.states
        self.tables = parts.store.tables
        self.block_size: i64 = parts.block_size
        self.max_model_len: i64 = parts.config.max_model_len
        #: Blocks that one state takes.
        self.state_blocks: i64 = parts.config.state_blocks
        self._slot_room = zeros_i64(0)
        self._num_slots: i64 = 0
        #: (position in the batch, first slot) of each sequence that takes a second look.
        self._slow = zeros_i64(0)
        self._num_slow: i64 = 0
        self._served = zeros_i64(0)
        #: By row, the tokens that are computed, or will be in this step as far as can be said before it begins.
        self._reached = zeros_i64(int(parts.sequences.max_num_seqs))
        self._transfers = Transfers()
        self._tokens = KnownTokens(parts.sequences, parts.token_blocks.index, parts.store.tables[0])

    def reserve_known(self, rows: vec[i64]) -> StepPlan:
        """Reserve for all tokens that are known and not computed."""
        return self.reserve(rows, self._all_known(rows))

    def reserve(self, rows: vec[i64], counts: vec[i64]) -> StepPlan:
        """Give the sequences in `rows` slots for their next `counts` tokens, as far as they can be served."""
        sequences = self.sequences
        if self.in_flight is not None:
            self.in_flight.require_step()
        first = self._firsts(rows)
        if self.states is not None:
            self.states.cut(rows, first, counts)
        starts = self._map_ready(rows, first, counts)
        if self._num_slow > 0 and self.kv_pool.stack is not None:
            self._evict_ahead(rows, starts, counts)
        # The answer is made before the first change, because making something can fail.
        transfers = Transfers()
        statuses = self._all_served(len(rows)) if self._num_slow == 0 else zeros_i64(len(rows))
        batch = Batch(sequences, self._tokens, rows, starts, counts, statuses)
        slots = self._slot_room[: self._num_slots] if self._num_slots <= len(self._slot_room) else zeros_i64(0)
        plan = StepPlan(self.tables, batch, slots, transfers)
        sequences.version += 1
        batch.version = sequences.version
        if self.in_flight is None:
            self._record(rows, counts)
        else:
            batch.step = self.in_flight.begin()
            self._open_ready(self.in_flight, rows, counts)
        if self._num_slow > 0:
            self._transfers = transfers
            plan._num_slots = self._serve_slow(rows, starts, counts, statuses, slots)
        if self.states is not None:
            self.states.save(transfers)
        self.store.finish(transfers)
        sequences.has_new_plan = True
        return plan

    def _all_known(self, rows: vec[i64]) -> vec[i64]:
        """Return all tokens of each sequence that are known, not computed and not in a step in flight."""
        sequences = self.sequences
        counts = rows[:]
        for index in range(i64(len(rows))):
            row = rows[index]
            counts[index] = max(sequences.num_tokens[row] - sequences.num_computed[row] - sequences.num_ahead[row], 0)
        return counts

    def _all_served(self, num_seqs: int) -> vec[i64]:
        """Statuses of a batch in which every sequence has its slots; they are never written."""
        if len(self._served) != num_seqs:
            self._served = zeros_i64(num_seqs)
        return self._served

    def can_append(self, rows: vec[i64], counts: vec[i64]) -> bool:
        """Return whether `reserve` would serve all of them now."""
        starts = self._map_ready(rows, self._firsts(rows), counts)
        if self.in_flight is not None and self.in_flight.is_full():
            return False
        for index in range(i64(len(rows))):
            if counts[index] > 0 and self.sequences.is_waiting(rows[index]):
                return False
        if self.parts.tenants is not None:
            return self._all_have_room(self.parts.tenants, rows, starts, counts)
        return self._num_missing(rows, starts, counts) <= self.kv_pool.queue.num_free

    def _all_have_room(self, tenants: TenantBook, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> bool:
        """Return the same where tenants share the pool: each takes what it lacks, and gives it back."""
        left = self.kv_pool.queue.num_free
        taken = zeros_i64(len(rows))
        fits = True
        for index in range(i64(len(rows))):
            slot = tenants.of_row[rows[index]]
            if counts[index] > 0 and fits:
                missing = self.store.num_missing(rows[index], starts[index], starts[index] + counts[index])
                fits = missing <= tenants.room(slot, left)
                taken[index] = missing
                left -= missing
                tenants.hold(slot, missing)
        for index in range(i64(len(rows))):
            tenants.hold(tenants.of_row[rows[index]], -taken[index])
        return fits

    def _evict_ahead(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> None:
        """Let an eviction policy name all victims before the first change, because it might fail.

        Those are for the sequences that can be served, in order; one that will get nothing evicts nothing, and those
        that are `ready` take nothing. A copy on write may not be needed any more when its turn comes, so without it a
        sequence counts as served. What is saved is taken when all sequences have theirs.
        """
        left = self.kv_pool.queue.num_free
        tenants = self.parts.tenants
        states = self.states
        if tenants is None and self.kv_pool.queue.knows_empty(self._num_most(counts)):
            return
        taken = zeros_i64(0 if tenants is None else len(rows))
        saves = zeros_i64(len(rows) if self.state_blocks > 0 else 0)
        if tenants is not None:
            tenants.ask_none()
        needed: i64 = 0
        #: Blocks that cache nothing and become free on the way, before any other is taken.
        freed: i64 = 0
        num_copies: i64 = 0
        if self.store.shares_at_once:
            for index in range(i64(len(rows))):
                self._reached[rows[index]] = self.sequences.num_computed[rows[index]]
        for position in range(self._num_slow):
            index = self._slow[2 * position]
            row = rows[index]
            if counts[index] > 0 and not self._will_wait(row):
                missing = self.store.num_missing(row, starts[index], starts[index] + counts[index])
                copies = self.store.num_copies(row, starts[index])
                slot: i64 = 0 if tenants is None else tenants.of_row[row]
                if missing - copies <= (left if tenants is None else tenants.room(slot, left)):
                    new = max(missing - freed, 0)
                    needed += new
                    dropped: i64 = 0 if states is None else states.saves.num_to_drop(row)
                    if tenants is not None:
                        tenants.ask(slot, new)
                        taken[index] = missing - copies - dropped
                        tenants.hold(slot, taken[index])
                    freed = max(freed - missing, 0) + dropped
                    left += dropped - missing + copies
                    num_copies += copies
                    if states is not None:
                        saves[index] = states.num_to_save(row, starts[index], starts[index] + counts[index])
                    if self.sequences.num_ahead[row] == 0:
                        self._reached[row] = starts[index] + counts[index]
        if self.state_blocks > 0:
            needed += self._ask_for_saves(rows, saves, taken, left - num_copies, freed)
        if tenants is not None:
            for index in range(i64(len(rows))):
                tenants.hold(tenants.of_row[rows[index]], -taken[index])
        self.kv_pool.evict_ahead(min(needed, self.kv_pool.queue.num_free))

    def _ask_for_saves(self, rows: vec[i64], saves: vec[i64], taken: vec[i64], left: i64, freed: i64) -> i64:
        """Ask for the blocks of those states that there is room for; return how many they are but for `freed` ones."""
        tenants = self.parts.tenants
        needed: i64 = 0
        for index in range(i64(len(rows))):
            if saves[index] > 0:
                slot: i64 = 0 if tenants is None else tenants.of_row[rows[index]]
                room = max(left if tenants is None else tenants.room(slot, left), 0)
                fits = min(saves[index], room - room % self.state_blocks)
                new = max(fits - freed, 0)
                if tenants is not None:
                    tenants.ask(slot, new)
                    tenants.hold(slot, fits)
                    taken[index] += fits
                needed += new
                freed = max(freed - fits, 0)
                left -= fits
        return needed

    def _num_most(self, counts: vec[i64]) -> i64:
        """Return a number of blocks that those which take a second look need at most. O(those)."""
        num_tokens: i64 = 0
        for position in range(self._num_slow):
            num_tokens += counts[self._slow[2 * position]]
        return self.store.num_most(self._num_slow, num_tokens)

    def _will_wait(self, row: i64) -> bool:
        """Return whether it waits for blocks of a sequence that is not in this step, or not served before it."""
        sequences = self.sequences
        if not sequences.is_waiting(row):
            return False
        owner = sequences.waits_on[row]
        return not sequences.in_batch(owner) or self._reached[owner] < sequences.waits_for[row]

    def _num_missing(self, rows: vec[i64], starts: vec[i64], counts: vec[i64]) -> i64:
        """Blocks that writing these tokens takes from the pool, copies on write included."""
        missing: i64 = 0
        for index in range(i64(len(rows))):
            if counts[index] > 0:
                missing += self.store.num_missing(rows[index], starts[index], starts[index] + counts[index])
        return missing

    def _map_ready(self, rows: vec[i64], first: vec[i64], counts: vec[i64]) -> vec[i64]:
        """Refuse bad counts before anything changes; returns where each sequence starts.

        first: by row, see `_firsts`.
        On the way the slots of all sequences that are `ready` are written to `_slot_room`, which is not visible yet;
        the others (`_slow`) are left out, with room for theirs. A step of more tokens than there is room for has
        prompts in it: all of its slots are made when the plan is asked for them.
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
                # A decoded token goes to the last block: no division needed to find it.
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

    def _firsts(self, rows: vec[i64]) -> vec[i64]:
        """Return by row where its next tokens begin."""
        return self.sequences.num_computed if self.in_flight is None else self.in_flight.starts(rows)

    def _make_room(self, num_seqs: i64) -> None:
        """Room for the slots of a step of decodes."""
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

    def _record(self, rows: vec[i64], counts: vec[i64]) -> None:
        num_reserved = self.sequences.num_reserved
        for index in range(i64(len(rows))):
            num_reserved[rows[index]] = counts[index]

    def _open_ready(self, in_flight: InFlight, rows: vec[i64], counts: vec[i64]) -> None:
        """The same where several steps may be in flight, for the sequences that take no second look."""
        slow: i64 = 0
        for index in range(i64(len(rows))):
            if slow < self._num_slow and self._slow[2 * slow] == index:
                slow += 1
            else:
                in_flight.open(rows[index], counts[index])

    def _serve_slow(
        self, rows: vec[i64], starts: vec[i64], counts: vec[i64], statuses: vec[i64], slots: vec[i64]
    ) -> i64:
        """Blocks, and then slots, for each sequence that takes a second look, in order; 0 tokens for those that do not
        fit. Returns how many slots there are now: all, or none where the plan makes them when asked."""
        sequences = self.sequences
        table = self.tables[0]
        maps = self._num_slots == len(slots)
        failed = False
        for position in range(self._num_slow):
            index = self._slow[2 * position]
            row = rows[index]
            end = starts[index] + counts[index]
            sequences.reserved_at[row] = sequences.version
            if sequences.ended_by[row] != 0 and sequences.ended_at[row] <= self._num_landed():
                sequences.forget_end(row)
            status = SCHEDULED
            if sequences.ready[row] == 0 or end > sequences.ready[row]:
                status = self._grow(row, starts[index], end)
            if status != SCHEDULED:
                statuses[index] = status
                counts[index] = 0
                if self.in_flight is None:
                    sequences.num_reserved[row] = 0
                failed = True
                continue
            if self.in_flight is not None:
                self.in_flight.open(row, counts[index])
            if maps and not failed:
                table.map_run(row, starts[index], end, slots, self._slow[2 * position + 1])
        if not maps:
            return 0
        return table.map_slots(rows, starts, counts, slots) if failed else self._num_slots

    def _num_landed(self) -> i64:
        """Return the latest step that has ended; 0 where steps have no numbers."""
        return 0 if self.in_flight is None else self.in_flight.fence.num_ended

    def _grow(self, row: i64, start: i64, end: i64) -> i64:
        """Give one sequence what it needs to write tokens `start` to `end`, or say why not."""
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
        """Return whether blocks it joined are neither computed nor being computed in this very step."""
        sequences = self.sequences
        owner = sequences.waits_on[row]
        if owner == NO_ROW:
            return False
        if not sequences.is_waiting(row):
            self.joins.settle(row)
            return False
        if self.in_flight is not None:
            return self.in_flight.num_reached(owner) < sequences.waits_for[row]
        reached = sequences.num_computed[owner]
        if sequences.reserved_at[owner] == sequences.version:
            reached += sequences.num_reserved[owner]
        return reached < sequences.waits_for[row]

    def _copy_beginning(self, row: i64, position: i64) -> None:
        """The prompt's hit ended inside a block: its first tokens come from another block that begins alike."""
        self._transfers.hold_sources(self.sequences.copy_from[row])
        for group, source in enumerate(self.sequences.copy_from[row]):
            self._transfers.copy(source, int(self.tables[group].block_at(row, position)), group)
        self.sequences.copy_from[row] = []

    def _store_pending(self, row: i64) -> None:
        """Put the token that waits in the row into its block, if that is there now."""
        token = self.sequences.pending_token[row]
        position = self.sequences.num_tokens[row] - 1
        logical = position // self.block_size
        if token != NO_TOKEN and logical < self.sequences.num_blocks[row]:
            index = self.token_blocks.index
            start = index.rows.start_of(self.sequences.block_at(row, logical))
            store_token(index.rows.words, start, position - logical * self.block_size, token)
            self.sequences.pending_token[row] = NO_TOKEN
