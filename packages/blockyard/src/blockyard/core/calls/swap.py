"""`swap_out` and `swap_in`: move sequences to the CPU pool and back, a whole batch or nothing."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import OutOfBlocks, SequenceNotReady
from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i64
from ..parts import Parts
from ..plan.plans import SwapPlan
from ..sequences.table import SWAPPED, SWAPPED_WITHOUT_STATE
from ..store.content_ledger import ContentLedger
from ..store.group_table import GroupTable
from ..store.grouped import GroupedStore
from ..store.state_group import StateGroup
from ..store.transfers import Transfers
from .in_flight import require_nothing_reserved


class SwapCalls:
    """Chooses where each block of a sequence is moved; the plan lists the moves.

    A block that several sequences share is moved once. If the other pool already caches its content, the block there is
    shared and nothing is moved. If the first step of a sequence has not run yet, a hit inside a block is dropped, and a
    state that the step would have loaded is released and looked up again by `swap_in`. If it was evicted meanwhile, the
    prompt is computed from the beginning.
    """

    def __init__(self, parts: Parts, store: GroupedStore, cpu: ContentLedger) -> None:
        self.sequences = parts.sequences
        self.interruption = parts.gate.interruption
        self.store = store
        self.pool = store.pool
        self.cpu = cpu
        self.states = parts.states
        self._no_sources: list[int] = []

    def can_swap_out(self, rows: vec[i64]) -> bool:
        """Return whether `swap_out` would move all of `rows`."""
        return self._are_ready(rows, False) and self._plan_out(rows).num_taken(self.cpu) <= self.cpu.queue.num_free

    def can_swap_in(self, rows: vec[i64]) -> bool:
        """Return whether `swap_in` would bring all of `rows` back."""
        if not self._are_ready(rows, True):
            return False
        states = self._find_states(rows)
        needed = self._plan_in(rows, states).num_taken(self.pool) + states.num_idle(self.pool)
        return needed <= self.pool.queue.num_free and not self._short(rows, states)

    def _are_ready(self, rows: vec[i64], swapped: bool) -> bool:
        """Return whether `_require_at` would raise for none of `rows`."""
        sequences = self.sequences
        for index in range(i64(len(rows))):
            row = rows[index]
            if (sequences.is_swapped[row] != 0) != swapped or sequences.num_reserved[row] > 0:
                return False
        return True

    def swap_out(self, rows: vec[i64]) -> SwapPlan:
        """Move the sequences in `rows` to the CPU pool, all or none."""
        for index in range(i64(len(rows))):
            self._require_at(rows[index], False, "swap_out")
        targets = self._plan_out(rows)
        needed = targets.num_taken(self.cpu)
        if needed > self.cpu.queue.num_free:
            raise OutOfBlocks(
                f"swap_out: seqs need {needed} CPU blocks; {self.cpu.num_free_blocks} "
                f"of {self.cpu.num_usable_blocks} are free",
                int(needed),
                self.cpu.num_free_blocks,
            )
        return self._carry_out(rows, targets)

    def _require_at(self, row: i64, swapped: bool, action: str) -> None:
        sequences = self.sequences
        if (sequences.is_swapped[row] != 0) != swapped:
            where = "swapped out already" if not swapped else "not swapped out"
            raise SequenceNotReady(f"{action}: {sequences.name(row)} is {where}")
        require_nothing_reserved(sequences, row, action)

    def _plan_out(self, rows: vec[i64]) -> "Targets":
        """Look the blocks up in the CPU pool, in the order of `_move_out`."""
        targets = Targets(self._num_places(rows))
        for index in range(i64(len(rows))):
            row = rows[index]
            for group in self.store.groups:
                place = self._num_worth(group, row) - 1
                while place >= group.num_null[row]:
                    block = group.block_at(row, place)
                    if group.cpu_block_at(row, place) != NULL_BLOCK:
                        targets.pass_by()
                    elif targets.is_new(block):
                        targets.set_found(self._find_on_cpu(block))
                    place -= 1
        return targets

    def _num_places(self, rows: vec[i64]) -> i64:
        """Return the number of blocks of all rows; shared ones count for each row."""
        count: i64 = 0
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                count += group.num_blocks[rows[index]] - group.num_null[rows[index]]
        return count

    def _num_worth(self, group: GroupTable, row: i64) -> i64:
        """Return how many blocks of a row have computed tokens. The others are freed instead of moved."""
        return min(group.num_blocks[row], group.num_places(self._num_written(row)))

    def _num_written(self, row: i64) -> i64:
        """Return the computed tokens of a row, without those that its next step would have copied."""
        if self.sequences.copy_from[row] and not self.store.has_states:
            return self.sequences.num_published[row] * self.sequences.block_size
        return self.sequences.num_computed[row]

    def _find_on_cpu(self, block: i64) -> i64:
        if not self.pool.is_cached(block):
            return NULL_BLOCK
        return self.cpu.find_content(self.pool.content_of(block), self.pool.group_of(block))

    def _carry_out(self, rows: vec[i64], targets: "Targets") -> SwapPlan:
        transfers = self._room_for(targets, 0)
        plan = SwapPlan(self.store.tables, transfers)
        if self.store.tier is not None:
            self.store.tier.tell(transfers)
        self.sequences.version += 1
        targets.share_found(self.cpu)
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                self._move_out(group, rows[index], transfers, targets)
            self._release_sources(rows[index])
        targets.release(self.cpu)
        self.store.finish(transfers)
        return plan

    def _release_sources(self, row: i64) -> None:
        """Mark a row as swapped out, and release the blocks that its first step would have copied or loaded."""
        sequences = self.sequences
        sequences.is_swapped[row] = SWAPPED
        sources = sequences.copy_from[row]
        if sources:
            sequences.num_computed[row] = self._num_written(row)
            sequences.is_swapped[row] = SWAPPED_WITHOUT_STATE if self.store.has_states else SWAPPED
            sequences.copy_from[row] = self._no_sources
            self.pool.release_sources(sources)

    def _room_for(self, targets: "Targets", num_held: i64) -> Transfers:
        """Allocate all memory for the moves. Each new block may evict one that has to be saved."""
        num_moves = targets.num_new
        if self.store.tier is not None:
            num_moves += self.store.tier.num_waiting()
        transfers = Transfers()
        transfers.make_room(num_moves, targets.num_new, num_held + num_moves)
        return transfers

    def _move_out(self, group: GroupTable, row: i64, transfers: Transfers, targets: "Targets") -> None:
        """Move the blocks of a row in one group. The call holds each target once, and each row that uses it once more.

        Blocks that were still to be loaded from the CPU pool stay there; the row holds them already.
        """
        worth = self._num_worth(group, row)
        place = group.num_blocks[row] - 1
        while place >= group.num_null[row]:
            block = group.block_at(row, place)
            target = group.cpu_block_at(row, place)
            if place < worth:
                move = targets.next_move()
                if target == NULL_BLOCK:
                    target = self._send(group, block, transfers, targets, move)
                    self.cpu.share_one(target)
            group.move_out(row, place, target)
            place -= 1
        group.num_loads[row] = 0
        keep = max(worth, group.num_null[row])
        if keep < group.num_blocks[row]:
            group.cut_row(row, keep)

    def _send(self, group: GroupTable, block: i64, transfers: Transfers, targets: "Targets", move: i64) -> i64:
        """Return the CPU block for `block`: a new one, or one that already has its content."""
        target = targets.target[move]
        if target == NULL_BLOCK:
            target = self._new_on_cpu(block)
            targets.target[move] = target
            transfers.swap_out(block, target, group.number)
        return target

    def _new_on_cpu(self, block: i64) -> i64:
        target = self.cpu.acquire_one()
        if self.pool.is_cached(block):
            self.cpu.cache_content(target, self.pool.content_of(block), self.pool.group_of(block))
        return target

    def swap_in(self, rows: vec[i64]) -> SwapPlan:
        """Bring the sequences in `rows` back, all or none."""
        for index in range(i64(len(rows))):
            self._require_at(rows[index], True, "swap_in")
        states = self._find_states(rows)
        targets = self._plan_in(rows, states)
        needed = targets.num_taken(self.pool) + states.num_idle(self.pool)
        if needed > self.pool.queue.num_free:
            raise OutOfBlocks(
                f"swap_in: seqs need {needed} blocks; {self.pool.num_free_blocks} "
                f"of {self.pool.num_usable_blocks} are free",
                int(needed),
                self.pool.num_free_blocks,
            )
        problem = self._short(rows, states)
        if problem:
            raise OutOfBlocks(f"swap_in: {problem}", int(needed), self.pool.num_free_blocks)
        return self._carry_in(rows, targets, states)

    def _find_states(self, rows: vec[i64]) -> "States":
        """Look up the states that sequences released when they were swapped out."""
        found = States()
        for index in range(i64(len(rows))):
            if self.sequences.is_swapped[rows[index]] == SWAPPED_WITHOUT_STATE and self.states is not None:
                found.add(rows[index], self._state_behind(rows[index], self.states))
        return found

    def _state_behind(self, row: i64, states: StateGroup) -> list[int]:
        """Return the blocks of the state after the computed tokens of a row; empty if it was evicted."""
        place = self.sequences.num_computed[row] // self.sequences.block_size - 1
        content = self.store.token_blocks.index.content_of(self.sequences.block_at(row, place))
        return [] if content == NO_CONTENT else states.hits.find(content)

    def _short(self, rows: vec[i64], states: "States") -> str:
        """Return the tenant that lacks room for its sequences' missing blocks; "" if none does."""
        if not self.pool.budget.is_shared:
            return ""
        return self.pool.budget.shortage(rows, self._needed_in(rows, True, states), self.pool.queue.num_free)

    def _needed_in(self, rows: vec[i64], with_finds: bool, states: "States") -> vec[i64]:
        """Return for each row how many free blocks it takes to bring it back.

        Args:
            rows: the rows.
            with_finds: True to count idle blocks of the pool that have the content too.
            states: the states of the rows.
        """
        counted: set[int] = set()
        needed = zeros_i64(len(rows))
        for index in range(i64(len(rows))):
            for block in states.of(rows[index]) if with_finds else []:
                if self.pool.ref_cnt[i64(block)] == 0 and -block not in counted:
                    counted.add(-block)
                    needed[index] += 1
            for group in self.store.groups:
                for place in range(group.num_null[rows[index]], self._last(group, rows[index], states)):
                    source = int(group.cpu_block_at(rows[index], place))
                    found = int(self._find_in_pool(i64(source)))
                    is_new = found == NULL_BLOCK or (with_finds and self.pool.ref_cnt[i64(found)] == 0)
                    mark = source if found == NULL_BLOCK else -found
                    if is_new and mark not in counted:
                        counted.add(mark)
                        needed[index] += 1
        return needed

    def _last(self, group: GroupTable, row: i64, states: "States") -> i64:
        """Return the end of the blocks to bring back: none of them if the state of the row was evicted."""
        return group.num_null[row] if states.is_lost(row) else group.num_blocks[row]

    def _plan_in(self, rows: vec[i64], states: "States") -> "Targets":
        """Look the blocks up in the pool, in the order of `_move_in`."""
        targets = Targets(self._num_places(rows))
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                for place in range(group.num_null[rows[index]], self._last(group, rows[index], states)):
                    source = group.cpu_block_at(rows[index], place)
                    if targets.is_new(source):
                        targets.set_found(self._find_in_pool(source))
        return targets

    def _find_in_pool(self, cpu_block: i64) -> i64:
        if not self.cpu.is_cached(cpu_block):
            return NULL_BLOCK
        return self.pool.find_content(self.cpu.content_of(cpu_block), self.cpu.group_of(cpu_block))

    def _carry_in(self, rows: vec[i64], targets: "Targets", states: "States") -> SwapPlan:
        transfers = self._room_for(targets, targets.num_places)
        plan = SwapPlan(self.store.tables, transfers)
        self._ask(rows, states)
        self._evict_ahead(targets, states)
        self.sequences.version += 1
        for index in range(i64(len(rows))):
            if states.is_lost(rows[index]):
                self.store.forget_hit(rows[index])
                self.sequences.num_computed[rows[index]] = 0
            else:
                for group in self.store.groups:
                    self._move_in(group, rows[index], transfers, targets)
                self.sequences.copy_from[rows[index]] = states.of(rows[index])
            self.sequences.is_swapped[rows[index]] = 0
            self.sequences.raise_alert(rows[index])
        targets.release(self.pool)
        self.store.finish(transfers)
        return plan

    def _ask(self, rows: vec[i64], states: "States") -> None:
        """Charge the evictions that follow to the tenants of the rows."""
        budget = self.pool.budget
        budget.expect_none()
        if budget.is_shared:
            needed = self._needed_in(rows, False, states)
            for index in range(i64(len(rows))):
                budget.expect(budget.tenant_of_row(rows[index]), needed[index])

    def _evict_ahead(self, targets: "Targets", states: "States") -> None:
        """Hold the blocks that were found, and choose all victims before the first change, as a policy may fail."""
        peak = self.pool.peak_used_blocks
        targets.share_found(self.pool)
        states.share(self.pool)
        try:
            self.interruption.raise_now()
            self.pool.evict_ahead(targets.num_new)
        except BaseException:
            states.unshare(self.pool)
            targets.unshare_found(self.pool)
            self.pool.peak_used_blocks = peak
            raise

    def _move_in(self, group: GroupTable, row: i64, transfers: Transfers, targets: "Targets") -> None:
        self.pool.charge_row(row)
        for place in range(group.num_null[row], group.num_blocks[row]):
            source = group.cpu_block_at(row, place)
            move = targets.next_move()
            target = targets.target[move]
            if target == NULL_BLOCK:
                target = self._new_in_pool(source)
                targets.target[move] = target
                transfers.swap_in(source, target, group.number)
            self.pool.share_one(target)
            group.move_in(row, place, target)
            # The source stays held until the plan is complete: nothing that this call evicts may be saved over it.
            transfers.hold(source)

    def _new_in_pool(self, cpu_block: i64) -> i64:
        target = self.pool.acquire_one()
        if self.cpu.is_cached(cpu_block):
            self.pool.cache_content(target, self.cpu.content_of(cpu_block), self.cpu.group_of(cpu_block))
        return target


class States:
    """States that swapped sequences had released: the blocks of each, or none if the state was evicted."""

    def __init__(self) -> None:
        self._parts: dict[int, list[int]] = {}
        self._nothing: list[int] = []

    def add(self, row: i64, parts: list[int]) -> None:
        """Record the blocks of the state of a row."""
        self._parts[int(row)] = parts

    def of(self, row: i64) -> list[int]:
        """Return the blocks of the state of a row; empty if it released none."""
        return self._parts.get(int(row), self._nothing)

    def is_lost(self, row: i64) -> bool:
        """Return whether a row released a state that has been evicted since."""
        return len(self._parts) > 0 and int(row) in self._parts and not self._parts[int(row)]

    def num_idle(self, pool: ContentLedger) -> i64:
        """Return how many free blocks of `pool` it takes to hold all states."""
        idle: set[int] = set()
        for parts in self._parts.values():
            idle.update([block for block in parts if pool.ref_cnt[i64(block)] == 0])
        return len(idle)

    def share(self, pool: ContentLedger) -> None:
        """Add a holder to each block, once per row that has it."""
        for parts in self._parts.values():
            for block in parts:
                pool.share_one(block)

    def unshare(self, pool: ContentLedger) -> None:
        """Undo `share`."""
        for parts in reversed(self._parts.values()):
            for block in reversed(parts):
                pool.unshare_one(block)


class Targets:
    """Target blocks of a swap. Each *move* is one decision, for all positions that share a block.

    Lookups come first and allocate memory; then blocks move without allocating. `next_move` returns the moves of the
    positions in the order of the calls of `is_new` and `pass_by`.

    Args:
        num_places: most positions that there can be.
    """

    def __init__(self, num_places: i64) -> None:
        self._move_of: dict[int, i64] = {}
        self._moves = zeros_i64(int(num_places))
        self.num_places: i64 = 0
        self._num_read: i64 = 0
        #: Of each move the block that was found, or taken; 0 while there is none.
        self.target = zeros_i64(int(num_places))
        self.num_moves: i64 = 0
        #: Moves for which nothing was found.
        self.num_new: i64 = 0

    def pass_by(self) -> None:
        """Record that the block at the next position is not moved."""
        self.num_places += 1

    def is_new(self, block: i64) -> bool:
        """Record the block at the next position. Return True if it was not seen before; then call `set_found`."""
        move = self._move_of.get(int(block), self.num_moves)
        self._moves[self.num_places] = move
        self.num_places += 1
        self._move_of[int(block)] = move
        return move == self.num_moves

    def set_found(self, block: i64) -> None:
        """Record the block of the other pool that has the same content; 0 for none."""
        self.target[self.num_moves] = block
        self.num_moves += 1
        if block == NULL_BLOCK:
            self.num_new += 1

    def num_taken(self, pool: ContentLedger) -> i64:
        """Return how many free blocks of `pool` the moves take: new ones, and each idle one found."""
        idle: set[int] = set()
        for move in range(self.num_moves):
            if self.target[move] != NULL_BLOCK and pool.ref_cnt[self.target[move]] == 0:
                idle.add(int(self.target[move]))
        return self.num_new + i64(len(idle))

    def next_move(self) -> i64:
        """Return the move of the next position."""
        self._num_read += 1
        return self._moves[self._num_read - 1]

    def share_found(self, pool: ContentLedger) -> None:
        """Hold the blocks that were found, so that none of them is evicted."""
        for move in range(self.num_moves):
            if self.target[move] != NULL_BLOCK:
                pool.share_one(self.target[move])

    def unshare_found(self, pool: ContentLedger) -> None:
        """Undo `share_found`."""
        move = self.num_moves - 1
        while move >= 0:
            if self.target[move] != NULL_BLOCK:
                pool.unshare_one(self.target[move])
            move -= 1

    def release(self, pool: ContentLedger) -> None:
        """Release all targets. The call holds each of them once."""
        for move in range(self.num_moves):
            pool.release_one(self.target[move])


def swap_calls(parts: Parts) -> SwapCalls | None:
    """Return the swap calls of a cache; None without a CPU pool."""
    if parts.grouped is None or parts.grouped.cpu is None:
        return None
    return SwapCalls(parts, parts.grouped, parts.grouped.cpu)
