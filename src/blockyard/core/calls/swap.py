"""Sequences to the CPU pool and back, whole batches, all or nothing."""

from librt.vecs import vec
from mypy_extensions import i64

from ...errors import OutOfBlocks, SequenceNotReady
from ...ids import NULL_BLOCK
from ..parts import Parts
from ..plan.swap_plan import SwapPlan
from ..store.content_ledger import ContentLedger
from ..store.group_table import GroupTable
from ..store.grouped import GroupedStore
from ..store.transfers import Transfers
from .in_flight import is_idle, require_nothing_reserved, require_nothing_to_copy


class SwapCalls:
    """Decides where each block of a sequence goes; the plan says what to move.

    A block that sequences share is moved once if they go together. What is cached already on the other side
    under the same content is shared there and not moved at all.
    """

    def __init__(self, parts: Parts, store: GroupedStore, cpu: ContentLedger) -> None:
        self.sequences = parts.sequences
        self.interruption = parts.gate.interruption
        self.store = store
        self.pool = store.pool
        self.cpu = cpu
        #: Where each block of the running call goes: one decision for all that share it.
        self._target: dict[int, int] = {}

    def can_swap_out(self, rows: vec[i64]) -> bool:
        """Return whether `swap_out` would move them."""
        return self._are_ready(rows, False) and self._plan_out(rows) <= self.cpu.queue.num_free

    def can_swap_in(self, rows: vec[i64]) -> bool:
        """Return whether `swap_in` would bring them back."""
        return self._are_ready(rows, True) and self._plan_in(rows) <= self.pool.queue.num_free

    def _are_ready(self, rows: vec[i64], swapped: bool) -> bool:
        """Return whether nothing of `_require_at` would be raised."""
        sequences = self.sequences
        for index in range(i64(len(rows))):
            row = rows[index]
            if (sequences.is_swapped[row] != 0) != swapped or not is_idle(sequences, row):
                return False
        return True

    def swap_out(self, rows: vec[i64]) -> SwapPlan:
        """Move the sequences in `rows` to the CPU pool, all or none."""
        for index in range(i64(len(rows))):
            self._require_at(rows[index], False, "swap_out")
        needed = self._plan_out(rows)
        if needed > self.cpu.queue.num_free:
            raise OutOfBlocks(
                f"swap_out: seqs need {needed} CPU blocks; {self.cpu.num_free_blocks} "
                f"of {self.cpu.num_usable_blocks} are free",
                int(needed),
                self.cpu.num_free_blocks,
            )
        return self._carry_out(rows)

    def _require_at(self, row: i64, swapped: bool, action: str) -> None:
        sequences = self.sequences
        if (sequences.is_swapped[row] != 0) != swapped:
            where = "swapped out already" if not swapped else "not swapped out"
            raise SequenceNotReady(f"{action}: {sequences.name(row)} is {where}")
        require_nothing_to_copy(sequences, row, action)
        require_nothing_reserved(sequences, row, action)

    def _plan_out(self, rows: vec[i64]) -> i64:
        """Find what the CPU pool has of the blocks; returns how many free CPU blocks the rest and idle finds take."""
        self._target = {}
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                for place in range(group.num_null[rows[index]], self._num_worth(group, rows[index])):
                    block = group.block_at(rows[index], place)
                    if group.cpu_block_at(rows[index], place) == NULL_BLOCK and int(block) not in self._target:
                        self._target[int(block)] = int(self._find_on_cpu(block))
        return self._num_taken(self.cpu)

    def _num_taken(self, pool: ContentLedger) -> i64:
        """Free blocks of `pool` that the targets take: new ones, and each idle find once."""
        idle: set[int] = set()
        needed: i64 = 0
        for found in self._target.values():
            if found == NULL_BLOCK:
                needed += 1
            elif pool.ref_cnt[i64(found)] == 0:
                idle.add(found)
        return needed + i64(len(idle))

    def _num_worth(self, group: GroupTable, row: i64) -> i64:
        """Places that hold computed tokens; what lies behind them is not worth keeping."""
        return min(group.num_blocks[row], group.num_places(self.sequences.num_computed[row]))

    def _find_on_cpu(self, block: i64) -> i64:
        if not self.pool.is_cached(block):
            return NULL_BLOCK
        return self.cpu.find_content(self.pool.content_of(block), self.pool.group_of(block))

    def _carry_out(self, rows: vec[i64]) -> SwapPlan:
        transfers = Transfers()
        plan = SwapPlan(self.store.tables, transfers)
        self.sequences.version += 1
        if self.store.tier is not None:
            self.store.tier.tell(transfers)
        # Finds are held first, so that no new CPU block is taken from among them.
        for found in self._target.values():
            if found != NULL_BLOCK:
                self.cpu.share_one(found)
        taken: list[int] = [found for found in self._target.values() if found != NULL_BLOCK]
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                self._move_out(group, rows[index], transfers, taken)
            self.sequences.is_swapped[rows[index]] = 1
        for block in taken:
            self.cpu.release_one(block)
        self.store.finish(transfers)
        return plan

    def _move_out(self, group: GroupTable, row: i64, transfers: Transfers, taken: list[int]) -> None:
        """Each target is held once by the call (`taken`) and once for each row that comes to it.

        What was to be loaded from a CPU block stays there, held by the row already.
        """
        worth = self._num_worth(group, row)
        place = group.num_blocks[row] - 1
        while place >= group.num_null[row]:
            block = group.block_at(row, place)
            target = group.cpu_block_at(row, place)
            if target == NULL_BLOCK and place < worth:
                target = self._send(group, block, transfers, taken)
                self.cpu.share_one(target)
            group.move_out(row, place, target)
            place -= 1
        group.num_loads[row] = 0
        keep = max(worth, group.num_null[row])
        if keep < group.num_blocks[row]:
            group.cut_row(row, keep)

    def _send(self, group: GroupTable, block: i64, transfers: Transfers, taken: list[int]) -> i64:
        """The CPU block that `block` goes to, or is found in."""
        target = i64(self._target[int(block)])
        if target == NULL_BLOCK:
            target = self._new_on_cpu(block)
            self._target[int(block)] = int(target)
            taken.append(int(target))
            transfers.swap_out(int(block), int(target), int(group.number))
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
        needed = self._plan_in(rows)
        if needed > self.pool.queue.num_free:
            raise OutOfBlocks(
                f"swap_in: seqs need {needed} blocks; {self.pool.num_free_blocks} "
                f"of {self.pool.num_usable_blocks} are free",
                int(needed),
                self.pool.num_free_blocks,
            )
        return self._carry_in(rows)

    def _plan_in(self, rows: vec[i64]) -> i64:
        """Find what the pool still has of the blocks; returns how many free blocks the rest and idle finds take."""
        self._target = {}
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                for place in range(group.num_null[rows[index]], group.num_blocks[rows[index]]):
                    source = group.cpu_block_at(rows[index], place)
                    if int(source) not in self._target:
                        self._target[int(source)] = int(self._find_in_pool(source))
        return self._num_taken(self.pool)

    def _find_in_pool(self, cpu_block: i64) -> i64:
        if not self.cpu.is_cached(cpu_block):
            return NULL_BLOCK
        return self.pool.find_content(self.cpu.content_of(cpu_block), self.cpu.group_of(cpu_block))

    def _carry_in(self, rows: vec[i64]) -> SwapPlan:
        taken: list[int] = [found for found in self._target.values() if found != NULL_BLOCK]
        transfers = Transfers()
        plan = SwapPlan(self.store.tables, transfers)
        self._evict_ahead(len(self._target) - len(taken), taken)
        self.sequences.version += 1
        for index in range(i64(len(rows))):
            for group in self.store.groups:
                self._move_in(group, rows[index], transfers, taken)
            self.sequences.is_swapped[rows[index]] = 0
            self.sequences.raise_alert(rows[index])
        for block in taken:
            self.pool.release_one(block)
        self.store.finish(transfers)
        return plan

    def _evict_ahead(self, count: i64, taken: list[int]) -> None:
        """Hold what was found, and let an eviction policy name all victims before the first change: it might fail."""
        peak = self.pool.peak_used_blocks
        for found in taken:
            self.pool.share_one(found)
        try:
            self.interruption.raise_now()
            self.pool.evict_ahead(count)
        except BaseException:
            for found in reversed(taken):
                self.pool.unshare_one(found)
            self.pool.peak_used_blocks = peak
            raise

    def _move_in(self, group: GroupTable, row: i64, transfers: Transfers, taken: list[int]) -> None:
        for place in range(group.num_null[row], group.num_blocks[row]):
            source = group.cpu_block_at(row, place)
            target = i64(self._target[int(source)])
            if target == NULL_BLOCK:
                target = self._new_in_pool(source)
                self._target[int(source)] = int(target)
                taken.append(int(target))
                transfers.swap_in(int(source), int(target), int(group.number))
            self.pool.share_one(target)
            group.move_in(row, place, target)
            # The source stays held until the plan is complete: nothing that this call evicts may be saved over it.
            transfers.hold(int(source))

    def _new_in_pool(self, cpu_block: i64) -> i64:
        target = self.pool.acquire_one()
        if self.cpu.is_cached(cpu_block):
            self.pool.cache_content(target, self.cpu.content_of(cpu_block), self.cpu.group_of(cpu_block))
        return target


def swap_calls(parts: Parts) -> SwapCalls | None:
    """Make the swaps of a cache with a CPU pool."""
    if parts.grouped is None or parts.grouped.cpu is None:
        return None
    return SwapCalls(parts, parts.grouped, parts.grouped.cpu)
