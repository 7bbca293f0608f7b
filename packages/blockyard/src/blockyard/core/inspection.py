"""Questions about a cache: its sequences, blocks and counters, and `check`."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..answers import CacheStats, Holding, MissCauses, Residency, TenantUse
from ..errors import InvalidArgument
from ..kv_events import KVCacheEvents
from ..tenants import shares_of
from .arrays import view_i32, view_i64, zeros_i64
from .blocks.block import KVCacheBlock
from .blocks.lease import BlockLease
from .budget import SharedBudget
from .calls.allocate import AllocateCalls
from .calls.evict import EvictCalls
from .calls.hints import HintCalls
from .checking import check_groups, check_sequences, check_steps
from .parts import Parts
from .sequences.block_table import BlockTable
from .sequences.table import NO_TOKEN


class Inspection:
    """The queries of a cache. Those that read more than one number must be called inside the gate."""

    def __init__(
        self, parts: Parts, allocate_calls: AllocateCalls, evict_calls: EvictCalls, hint_calls: HintCalls
    ) -> None:
        self.parts = parts
        self.hint_calls = hint_calls
        self.sequences = parts.sequences
        self.store = parts.store
        self.allocate_calls = allocate_calls
        self.evict_calls = evict_calls

    # Sequences.

    def column(self, column: vec[i64], rows: vec[i64]) -> npt.NDArray[np.int64]:
        """Return the values of a column of the sequence table for `rows`."""
        values = zeros_i64(len(rows))
        for index in range(i64(len(rows))):
            values[index] = column[rows[index]]
        return view_i64(values)

    def token_ids(self, row: i64) -> npt.NDArray[np.int32]:
        """Return a copy of the known tokens of a sequence."""
        num_tokens = int(self.sequences.num_tokens[row])
        pending = self.sequences.pending_token[row]
        stored = num_tokens if pending == NO_TOKEN else num_tokens - 1
        tokens = self.parts.token_blocks.block_tokens(self.sequences.row_blocks(row), stored)
        return tokens if pending == NO_TOKEN else np.append(tokens, np.int32(pending))

    def num_owned_blocks(self, rows: vec[i64]) -> npt.NDArray[np.int64]:
        """Return how many blocks only this sequence holds, for each sequence."""
        owned = zeros_i64(len(rows))
        ref_cnt = self.parts.kv_pool.ref_cnt
        for index in range(i64(len(rows))):
            for source in self.sequences.copy_from[rows[index]]:
                if ref_cnt[i64(source)] == 1:
                    owned[index] += 1
            for table in self.store.tables:
                first = rows[index] * table.width
                for position in range(first, first + table.num_blocks[rows[index]]):
                    if ref_cnt[i64(table.blocks[position])] == 1:
                        owned[index] += 1
        return view_i64(owned)

    def running(self) -> dict[int, str]:
        """Return the running sequences and their holders."""
        sequences = self.sequences
        return {int(sequences.handle[i64(row)]): sequences.holders[row] for row in sequences.live_rows()}

    # The pool.

    def stats(self) -> CacheStats:
        """Return the counters and the state now."""
        pool = self.parts.pool
        counts = self.allocate_calls.counts
        states = self.parts.states
        saved, cached, replaced, refused = (0, 0, 0, 0) if states is None else states.counts()
        return CacheStats(
            num_prompt_tokens=int(counts.num_prompt_tokens),
            num_hit_tokens=int(counts.num_hit_tokens),
            num_evicted_blocks=pool.num_evicted_blocks,
            num_copied_blocks=int(self.store.num_copied_blocks),
            peak_used_blocks=pool.peak_used_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_used_blocks=pool.num_used_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_running_seqs=int(self.sequences.num_live_rows()),
            num_wasted_slots=self._num_wasted_slots(),
            num_resumed_tokens=int(counts.num_resumed_tokens),
            num_resumed_hit_tokens=int(counts.num_resumed_hit_tokens),
            num_allocated_blocks=pool.num_allocated_blocks,
            num_freed_blocks=pool.num_freed_blocks,
            num_retained_blocks=self.evict_calls.order.num_retained,
            num_sessions=self.hint_calls.num_sessions(),
            num_hinted_evictions=self.evict_calls.order.num_hinted_evictions(),
            num_saved_states=saved,
            num_kept_states=cached,
            num_replaced_states=replaced,
            num_refused_states=refused,
            tenants=self._tenants(),
            num_bytes=int(self.parts.kv_pool.num_blocks) * self.parts.config.block_bytes,
            block_bytes=self.parts.config.block_bytes,
            num_padding_bytes=self._num_padding_bytes(),
        )

    def num_held_by_tenant(self) -> npt.NDArray[np.int64]:
        """Return how many blocks each tenant holds; empty without tenants."""
        return view_i64(self.parts.budget.held).copy()

    def _tenants(self) -> tuple[TenantUse, ...]:
        """Return what each tenant holds and may hold, "*" first; () if the pool is not shared. O(tenants)."""
        budget = self.parts.budget
        if not isinstance(budget, SharedBudget):
            return ()
        quotas = shares_of(budget.roster.groups, self.parts.kv_pool.num_blocks - 1)
        return tuple([self._use(budget, slot, quotas[slot]) for slot in range(int(budget.num_tenants))])

    def _use(self, budget: SharedBudget, slot: int, quota: int) -> TenantUse:
        member, group = budget.roster.members[slot], budget.roster.group_of[slot].name
        stack = self.parts.kv_pool.stack
        return TenantUse(
            member.name,
            "" if member.name == group else group,
            int(budget.held[i64(slot)]),
            stack.num_idle_of(slot),
            stack.num_retained_of(slot),
            member.min_blocks,
            member.max_held,
            member.max_idle,
            member.max_retained,
            member.weight,
            quota,
            int(budget.num_evicted[i64(slot)]),
        )

    def _num_padding_bytes(self) -> int:
        """Return the bytes that running sequences leave empty in their blocks. O(running sequences * groups)."""
        config = self.parts.config
        padding = 0
        for group, table in zip(config.layer_groups, self.store.tables, strict=True):
            each = config.block_bytes - group.block_bytes
            if each > 0:
                held = sum(
                    [table.num_blocks[i64(row)] - table.num_null[i64(row)] for row in self.sequences.live_rows()]
                )
                padding += each * int(held)
        return padding

    def _num_wasted_slots(self) -> int:
        wasted: i64 = 0
        for row in self.sequences.live_rows():
            if self.sequences.is_swapped[i64(row)] == 0:
                for table in self.store.tables:
                    slots = table.num_blocks[i64(row)] * table.block_size
                    wasted += max(slots - self.sequences.num_tokens[i64(row)], 0)
        return int(wasted)

    def block(self, number: int) -> KVCacheBlock:
        """Return one block, with the sequences that hold it."""
        block = self.parts.leases.describe(number)
        if self.parts.grouped is not None:
            self.parts.grouped.describe(block)
        for row in self.sequences.live_rows():
            for group, table in enumerate(self.store.tables):
                places = np.flatnonzero(view_i32(table.row_blocks(i64(row))) == number)
                if number and len(places) > 0:
                    block.holders.append(self.sequences.name(i64(row)))
                    tokens = self._num_tokens_at(table, i64(row), i64(places[0]))
                    block.num_tokens = max(block.num_tokens, int(tokens))
                    block.group = group if tokens > 0 else block.group
            if block.block_id in self.sequences.copy_from[i64(row)]:
                block.holders.append(self.sequences.name(i64(row)))
        step = self.parts.kv_pool.fence.step_of(number)
        if step > 0:
            block.holders.append(f"step {step}, in flight")
        return block

    def _num_tokens_at(self, table: BlockTable, row: i64, place: i64) -> i64:
        """Return how many known tokens of a sequence are in the block at `place`."""
        stored = self.sequences.num_tokens[row] - (1 if self.sequences.pending_token[row] != NO_TOKEN else 0)
        return min(max(stored - place * table.block_size, 0), table.block_size)

    # What happened, and why.

    def miss_causes(self, row: i64) -> MissCauses:
        """Return why tokens of a sequence's prompt were not hit."""
        return self.parts.misses.of_row(row)

    def miss_totals(self) -> MissCauses:
        """Return the causes of misses of all prompts."""
        return self.parts.misses.in_all()

    def residency(self) -> Residency:
        """Return how long sampled blocks lived."""
        if self.parts.residency is None:
            raise InvalidArgument(
                "residency_sample is 0; set ObserveConfig(residency_sample=1) or more to sample blocks"
            )
        return self.parts.residency.residency()

    def take_events(self) -> KVCacheEvents:
        """Return the contents cached and uncached since the last call."""
        if self.parts.events is None:
            raise InvalidArgument(
                "enable_kv_cache_events is False; set ObserveConfig(enable_kv_cache_events=True) to record events"
            )
        return self.parts.events.take()

    # Leaks and invariants.

    def leak_report(self) -> list[Holding]:
        """Return who holds which blocks."""
        sequences = [self._holding(i64(row)) for row in self.sequences.live_rows()]
        leases = [_lease_holding(lease, lease.held_ids(), []) for lease in self.parts.pool.leases()]
        if self.parts.cpu_pool is not None:
            leases += [_lease_holding(lease, [], list(lease)) for lease in self.parts.cpu_pool.leases()]
        fence = self.parts.kv_pool.fence
        if fence.num_blocks > 0:
            leases.append(Holding("steps in flight", int(fence.num_ended) + 1, "", 0, fence.block_ids(), []))
        return sequences + leases

    def _holding(self, row: i64) -> Holding:
        sequences = self.sequences
        blocks: list[int] = []
        for table in self.store.tables:
            blocks += [int(block) for block in table.row_blocks(row) if block != 0]
        blocks += sequences.copy_from[row]
        if self.parts.states is not None:
            blocks += self.parts.states.pending_blocks(row)
        kind = "swapped sequence" if sequences.is_swapped[row] != 0 else "sequence"
        return Holding(
            kind,
            int(sequences.handle[row]),
            sequences.holders[row],
            int(sequences.num_tokens[row]),
            blocks,
            self.store.cpu_blocks_of(row),
        )

    def check(self) -> None:
        """Verify every invariant."""
        parts = self.parts
        parts.token_blocks.check()
        check_steps(parts.kv_pool, parts.sequences)
        self.hint_calls.check()
        leases = parts.pool.leases()
        if parts.grouped is None:
            check_sequences(parts.token_blocks, leases, self.sequences, True)
        else:
            check_sequences(parts.token_blocks, leases, self.sequences, False)
            check_groups(
                parts.grouped, parts.states, leases, parts.cpu_pool.leases() if parts.cpu_pool is not None else []
            )


def _lease_holding(lease: BlockLease, block_ids: list[int], cpu_block_ids: list[int]) -> Holding:
    return Holding("lease", lease.serial, lease.holder, 0, block_ids, cpu_block_ids)
