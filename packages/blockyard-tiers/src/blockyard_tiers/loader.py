"""Loads prefixes of waiting prompts from tiers into host buffers, and writes them into blocks of admitted requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from blockyard import StepPlan
from blockyard.answers import SeqStatus
from blockyard.errors import BlockyardError, InvariantError
from blockyard.keys import ExtraKey

from .context import Context, PendingCopy
from .engine_memory import IsDone
from .finder import Finder
from .header import NameChain
from .state_names import state_name
from .store_buffers import TRANSFER_BYTES
from .tier import Transfer, TransferResult
from .transfers import OffloadTransfer, PrefixLoad, RequestRecord, Segment, may_be_queued
from .uses import TierUse

#: Waiting requests that are checked again between two calls of `begin_poll`: each costs a lookup of its tokens.
_MAX_RECHECKS = 16


class Loader:
    """Looks up waiting prompts in the tiers, loads their objects, and writes them to blocks of admitted sequences.

    Args:
        context: objects shared by storing and loading.
        rows: the buffers for loads.
        finder: searches the tiers, and compares loading with computing.
        on_plan: carries out the moves of a plan that is made here.
        missed_tokens: counts the tokens that were not loaded, by cause.
    """

    def __init__(
        self,
        context: Context,
        rows: list[int],
        finder: Finder,
        on_plan: Callable[[StepPlan], None] | None,
        missed_tokens: Counter[str],
    ) -> None:
        #: Buffers that no load uses.
        self.free = rows
        self._all_rows = tuple(rows)
        #: Transfers under way, by id.
        self.transfers: dict[int, OffloadTransfer] = {}
        self._context = context
        self._cache, self._blocks, self._states = context.cache, context.blocks, context.states
        self._block_size = context.block_size
        self._finder = finder
        self._on_plan = on_plan
        self._missed_tokens = missed_tokens
        #: Loads by the name of their first block.
        self._loads: dict[bytes, PrefixLoad] = {}
        self._num_rechecks = self._num_polls = 0

    def begin_poll(self) -> None:
        """Reset the number of rechecks that are left. Called in each `Offload.poll`."""
        self._num_rechecks, self._num_polls = _MAX_RECHECKS, self._num_polls + 1

    def prepare(
        self,
        key: Hashable,
        record: RequestRecord,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...],
        will_start: bool,
    ) -> None:
        """Continue with a waiting request: search for its blocks, start loading them, or give up a late load."""
        now = self._context.clock()
        if record.load is not None and not record.load.is_running:
            self._offer(record, record.load, token_ids, extra_keys)
        if record.is_deferred and self._can_start(token_ids, extra_keys, will_start):
            record.is_deferred, record.waiting_since, record.search = False, now, None
        if record.load is None and not record.is_deferred:
            record.chain.extend(token_ids)
            record.token_ids = token_ids
            self._look_up(key, record, token_ids, extra_keys, now, will_start)
        if record.load is not None and now > record.load.deadline:
            record.is_settled = record.load.is_running

    def fill(self, seq: int, record: RequestRecord) -> int:
        """Write a request's loaded blocks into its sequence, end its load, and return the tokens. O(bytes)."""
        filled, cause, is_copied = 0, "late", None
        load = record.load
        try:
            if load is not None:
                cause = "late" if load.is_running else "failed"
                filled, is_copied = self._fill(seq, record, load)
            if filled and self._states is not None:
                record.state_positions.append(int(self._cache.num_computed_tokens(seq)))
        finally:
            if load is not None:
                self._drop_load(load, is_copied)
        self._count_missed(record, seq, cause)
        return filled

    def leave(self, key: Hashable, record: RequestRecord) -> None:
        """Remove a request from its load. The load is dropped with its last request."""
        if (load := record.load) is not None:
            load.keys.discard(key)
            if not load.keys:
                self._drop_load(load)

    def end(self, result: TransferResult) -> bool:
        """Process the result of a transfer; return False if it is not a load."""
        transfer = self.transfers.pop(result.id, None)
        if transfer is None or transfer.segment is None:
            return False
        transfer.use.note_presence(transfer.names, result.is_done)
        transfer.is_done = result.is_done
        if transfer.is_dropped:
            self.free += transfer.rows
        segment = transfer.segment
        segment.num_running -= 1
        if result.is_done:
            segment.num_bytes += result.num_bytes
            segment.seconds = max(segment.seconds, result.seconds)
        if segment.num_running == 0 and segment.num_bytes:
            transfer.use.cost.note(segment.num_bytes, segment.seconds, self._context.clock())
        return True

    def rows(self) -> list[int]:
        """Return the buffers that are free, used by a load, or read by a copy. O(rows)."""
        copied = self._context.rows_of_copies() & set(self._all_rows)
        return [*self.free, *copied, *(row for each in self._used_transfers() for row in each.rows)]

    def _used_transfers(self) -> list[OffloadTransfer]:
        """Return the transfers under way, and those of loads that wait for their requests."""
        transfers = {id(each): each for load in self._loads.values() for each in load.all_transfers()}
        transfers |= {id(each): each for each in self.transfers.values()}
        return list(transfers.values())

    def mend(self) -> None:
        """Make loads, records and free rows agree again, after a call that was interrupted. O(rows + requests)."""
        records = self._context.records
        for load in list(self._loads.values()):
            load.keys = {key for key, record in records.items() if record.load is load}
            if not load.keys:
                del self._loads[load.names[load.first]]
        loads = {id(load) for load in self._loads.values()}
        for record in records.values():
            if record.load is not None and id(record.load) not in loads:
                record.load, record.waiting_since = None, self._context.clock()
        loaded = [each for load in self._loads.values() for each in load.all_transfers()]
        under_way = {id(each) for each in self.transfers.values()}
        for each in loaded:
            if each.is_done is None and id(each) not in under_way:
                each.is_done = False  # its result is lost
        kept = {id(each) for each in loaded}
        for each in self.transfers.values():
            each.is_dropped = id(each) not in kept
        used = self._context.rows_of_copies().union(*(each.rows for each in self._used_transfers()))
        self.free[:] = [row for row in self._all_rows if row not in used]

    def check(self) -> None:
        """Raise `InvariantError` unless loads and request records refer to one another. O(requests)."""
        records = self._context.records
        for load in self._loads.values():
            if not load.keys or any(records[key].load is not load for key in load.keys):
                raise InvariantError("offload: a load has no request, or a request that does not refer to it")
        for key, record in records.items():
            if record.load is not None and key not in record.load.keys:
                raise InvariantError("offload: a request waits for a load that does not list it")

    # Looking up a prompt's blocks.

    def _look_up(
        self,
        key: Hashable,
        record: RequestRecord,
        token_ids: Sequence[int],
        extra_keys: tuple[ExtraKey, ...],
        now: float,
        will_start: bool,
    ) -> None:
        """Search the tiers for blocks that the pool lacks, and start loading them, or join another load of them."""
        cached = self._cache.num_cached_tokens(token_ids, extra_keys=extra_keys) // self._block_size
        usable = (len(token_ids) - 1) // self._block_size
        if cached >= usable:
            record.is_deferred = True  # until it starts, the pool may evict them
            return
        if self._join_shared(key, record, cached, usable, now):
            return
        found, pending = self._finder.find(record.chain.names, cached, usable)
        best, stop = (found[-1].use, found[-1].stop) if found else (None, cached)
        if self._finder.should_wait(record, pending, best, usable - stop or usable - cached, now):
            return
        record.num_found, record.num_chosen = stop, cached
        record.cause = record.rest_cause = self._rest_cause(pending)
        chosen = self._finder.choose(record, found, len(self.free), now)
        if record.cause == "no_buffers":
            if not self._can_start(token_ids, extra_keys, will_start):
                record.is_deferred = True
                return
            self._reclaim(stop - cached + (0 if self._states is None else self._states.num_rows))
            record.cause = record.rest_cause
            chosen = self._finder.choose(record, found, len(self.free), now)
            if record.cause == "no_buffers" and self._waits_for_buffers(record, usable - cached, now):
                return
        if self._states is not None and chosen:
            self._start_with_state(key, record, chosen, cached, usable, now)
        else:
            self._start(key, record, chosen, None, cached, now)

    def _join_shared(self, key: Hashable, record: RequestRecord, cached: int, usable: int, now: float) -> bool:
        """Join another request's load of the first missing block, if there is one. Return False if not.

        If that load ends in a state after other tokens, it is of no use here. The request then waits for a while,
        because the blocks before the state may soon be in the pool.
        """
        names = record.chain.names
        shared = self._loads.get(names[cached])
        if shared is None:
            return False
        if shared.generation != record.generation:
            self._drop_load(shared)
            return False
        stop = shared.transfers[-1].stop
        if shared.state is None or (stop <= usable and names[stop - 1] == shared.names[stop - 1]):
            record.num_found = record.num_chosen = stop
            self._join(key, record, shared)
        else:
            record.is_settled = now - record.waiting_since > self._finder.patience(usable - cached)
        return True

    def _waits_for_buffers(self, record: RequestRecord, num_missing: int, now: float) -> bool:
        """Return whether a request without enough buffers waits for those of others. It may be deferred."""
        is_freeing = bool(self._context.copies or self.transfers)  # rows become free without further action
        if is_freeing and self._is_patient(record, num_missing, now):
            return True
        record.is_deferred = bool(self._loads)  # other requests are ahead, and start first
        return record.is_deferred

    def _start_with_state(
        self, key: Hashable, record: RequestRecord, chosen: list[Segment], cached: int, usable: int, now: float
    ) -> None:
        """Search the tiers for the last state within the chosen blocks, and start loading the blocks up to it."""
        state, pending, is_searched = self._finder.find_state(
            self._context.state_layout, record, cached, chosen[-1].stop
        )
        best = next((use for use in reversed(self._context.uses) if use not in pending), None)
        if self._finder.should_wait(record, pending, best, usable - cached, now):
            return
        if not is_searched and self._is_patient(record, usable - cached, now):
            return
        chosen = self._finder.choose_up_to_state(record, chosen, state, now)
        if state is None and (pending or not is_searched):
            record.cause = "late"
        self._start(key, record, chosen, state, cached, now)

    def _start(
        self,
        key: Hashable,
        record: RequestRecord,
        chosen: list[Segment],
        state: Segment | None,
        cached: int,
        now: float,
    ) -> None:
        record.num_chosen = chosen[-1].stop if chosen else cached
        record.is_settled = not chosen or not self._begin(key, record, chosen, state, now)

    def _is_patient(self, record: RequestRecord, num_blocks: int, now: float) -> bool:
        return now - record.waiting_since <= self._finder.patience(num_blocks)

    def _rest_cause(self, pending: list[TierUse]) -> str:
        """Return why the found prefix ends: a tier has not answered or is failing, or no tier has the next block."""
        if pending:
            return "late"
        return "failed" if any(use.tier.stats().is_load_failing for use in self._context.uses) else "absent"

    # Buffers of waiting requests.

    def _can_start(self, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...], will_start: bool) -> bool:
        """Return whether a waiting request could start now; False once all rechecks are used up. O(tokens)."""
        if will_start:
            return True
        self._num_rechecks -= 1
        return self._num_rechecks >= 0 and bool(self._cache.can_allocate(token_ids, extra_keys=extra_keys))

    def _offer(
        self, record: RequestRecord, load: PrefixLoad, token_ids: Sequence[int], extra_keys: tuple[ExtraKey, ...]
    ) -> None:
        """Note that a request may start with its load. Drop the load if the pool has evicted the blocks before it."""
        if load.offered_at and load.first and not record.is_settled and self._num_rechecks > 0:
            self._num_rechecks -= 1
            if self._cache.num_cached_tokens(token_ids, extra_keys=extra_keys) < load.first * self._block_size:
                self._drop_load(load)
        load.offered_at = self._num_polls

    def _reclaim(self, num_rows: int) -> None:
        """Drop finished loads of requests that did not start with them, the latest first, until rows are free.

        Requests that were prepared since `begin_poll` are ahead in the queue: those that can start keep their loads.
        """
        for load in reversed(list(self._loads.values())):
            if len(self.free) >= num_rows or self._num_rechecks <= 0:
                return
            records = [self._context.records[key] for key in load.keys]
            if load.is_running or not load.offered_at:
                continue
            is_ahead = load.offered_at == self._num_polls
            if is_ahead and any(self._can_start(each.token_ids, each.extra_keys, False) for each in records):
                continue
            for record in records:
                record.is_deferred = True
            self._drop_load(load)

    def _begin(
        self, key: Hashable, record: RequestRecord, chosen: list[Segment], state: Segment | None, now: float
    ) -> bool:
        """Submit the transfers of a load up to the first that is refused; return whether the load can be used.

        A load with a state can only be used if it is complete, so the state is submitted first.
        """
        cached = chosen[0].first
        deadline = now + self._finder.patience(record.num_chosen - cached)
        load = PrefixLoad(record.chain.names, cached, record.generation, deadline)
        is_of_use = False
        try:
            is_of_use = self._submit_load(load, record.chain, chosen, state)
        finally:  # also if a tier raises: the transfers before it are running
            if not is_of_use:
                for transfer in load.all_transfers():
                    transfer.is_dropped = True
        if is_of_use:
            self._loads[load.names[cached]] = load
            self._join(key, record, load)
        return is_of_use

    def _submit_load(self, load: PrefixLoad, chain: NameChain, chosen: list[Segment], state: Segment | None) -> bool:
        if state is not None:
            load.state = self._load_state(chain, state)
            if load.state is None:
                return False
        blocks = max(TRANSFER_BYTES // self._blocks.object_bytes, 1)
        for segment in chosen:
            for first in range(segment.first, segment.stop, blocks):
                transfer = self._load_blocks(chain, segment, first, min(first + blocks, segment.stop))
                if transfer is None:
                    break
                load.transfers.append(transfer)
            if not load.transfers or load.transfers[-1].stop < segment.stop:
                break
        return bool(load.transfers) and (state is None or load.transfers[-1].stop == state.stop)

    def _load_blocks(self, chain: NameChain, segment: Segment, first: int, stop: int) -> OffloadTransfer | None:
        rows = [self.free.pop() for _ in range(first, stop)]
        transfer = OffloadTransfer(segment.use, chain.names[first:stop], rows, first, stop, segment)
        buffers = [self._blocks.buffer(row) for row in rows]
        return self._submit(transfer, self._context.layout(), chain.digests[first:stop], buffers)

    def _load_state(self, chain: NameChain, state: Segment) -> OffloadTransfer | None:
        if self._states is None:
            return None
        rows, stop = [self.free.pop() for _ in range(self._states.num_rows)], state.stop
        name = state_name(self._context.state_layout, chain.names[stop - 1])
        transfer = OffloadTransfer(state.use, [name], rows, stop, stop, state)
        buffers = [self._states.buffers(rows)]
        return self._submit(transfer, self._context.state_layout, [chain.digests[stop - 1]], buffers)

    def _submit(
        self, transfer: OffloadTransfer, layout: bytes, digests: list[bytes], buffers: list[Any]
    ) -> OffloadTransfer | None:
        """Give a transfer to its tier, and return it; if the tier refuses it, free its rows and return None.

        A tier that raises an ordinary exception has queued nothing. After an interrupt, or without memory, it may have
        queued the transfer, so the rows are free only when the result arrives.
        """
        number = next(self._context.numbers)
        self.transfers[number] = transfer
        is_queued = False
        try:
            cause = transfer.use.tier.load(Transfer(number, layout, transfer.names, digests, buffers))
            is_queued = cause is None
        except BaseException as error:
            is_queued = transfer.is_dropped = may_be_queued(error)
            raise
        finally:
            if is_queued and transfer.segment is not None:
                transfer.segment.num_running += 1
            elif not is_queued:
                del self.transfers[number]
                self.free += transfer.rows
        return transfer if is_queued else None

    def _join(self, key: Hashable, record: RequestRecord, load: PrefixLoad) -> None:
        record.load = load
        load.keys.add(key)

    # Ends of loads.

    def _fill(self, seq: int, record: RequestRecord, load: PrefixLoad) -> tuple[int, IsDone | None]:
        """Write the loaded blocks that belong to this prompt, beginning where the pool's hit ends."""
        size, computed, loaded = self._block_size, int(self._cache.num_computed_tokens(seq)), load.loaded()
        usable = (int(self._cache.num_tokens(seq)) - 1) // size
        stop = min(loaded[-1].stop if loaded else load.first, usable)
        while stop > load.first and load.names[stop - 1] != record.chain.names[stop - 1]:
            stop -= 1  # another prompt's load, which continues differently
        # Blocks before the load may have been evicted since, and a load of older weights is of no use.
        if computed < load.first * size or load.generation != self._cache.generation or stop * size <= computed:
            return 0, None
        # Neither is a load for tokens that the request no longer has.
        if not record.chain.matches(self._cache.token_ids(seq), 0, stop):
            return 0, None
        rows = {each.first + at: row for each in loaded for at, row in enumerate(each.rows)}
        if load.state is not None:
            filled, is_copied = self._write_with_state(seq, computed, stop * size, rows, load.state)
        else:
            filled, is_copied = self._write(seq, computed, stop * size, rows)
        for each in loaded:
            blocks = min(each.stop, (computed + filled) // size) - max(each.first, computed // size)
            each.use.num_hit_tokens += max(blocks, 0) * size
        return filled, is_copied

    def _write(self, seq: int, computed: int, stop: int, rows: dict[int, int]) -> tuple[int, IsDone | None]:
        """Reserve, write and commit, in smaller parts if a window is short of blocks; return the tokens."""
        size, begun, part = self._block_size, computed, stop - computed
        is_copied = None
        while computed < stop:
            count = min(part, stop - computed)
            plan = self._reserve(seq, count)
            status = int(plan.status[0])
            if status == SeqStatus.NO_BLOCKS.value and count > size:
                part = max(count // 2 // size * size, size)
                continue
            if status != SeqStatus.SCHEDULED.value:
                break
            positions = range(computed // size, -(-(computed + count) // size))
            ids = self._context.block_ids(seq, positions)
            is_copied = self._blocks.write(ids, [rows[position] for position in positions])
            self._cache.commit([seq], [count])
            computed += count
        return computed - begun, is_copied

    def _write_with_state(
        self, seq: int, computed: int, stop: int, rows: dict[int, int], state: OffloadTransfer
    ) -> tuple[int, IsDone | None]:
        """Reserve, write and commit everything before a state in one step, or nothing: there is no state in between."""
        size, count = self._block_size, stop - computed
        if self._states is None or not state.is_done or state.stop * size != stop:
            return 0, None
        if not self._cache.can_append([seq], [count]):
            return 0, None
        self._cache.states.skip(seq, stop)
        plan = self._reserve(seq, count)
        if int(plan.num_scheduled[0]) != count:
            return 0, None
        positions = range(computed // size, stop // size)
        self._blocks.write(self._context.block_ids(seq, positions), [rows[position] for position in positions])
        is_copied = self._states.write(int(plan.rows[0]), state.rows, plan.states.save_blocks)
        self._cache.commit([seq], [count])
        return count, is_copied

    def _reserve(self, seq: int, count: int) -> StepPlan:
        """Reserve slots for the next `count` tokens, and carry out the moves of the plan.

        If that is interrupted, moves may be missing: blocks that the cache believes to be copied are not. Then the
        prefix cache is reset, so that nothing hits them.
        """
        plan: StepPlan | None = None
        try:
            plan = self._cache.reserve([seq], [count])
            if self._on_plan is not None:
                self._on_plan(plan)
        except BaseException as error:
            was_refused = plan is None and isinstance(error, BlockyardError)
            if self._on_plan is not None and not was_refused:
                self._cache.reset_prefix_cache()
            raise
        return plan

    def _count_missed(self, record: RequestRecord, seq: int, cause: str) -> None:
        """Count the tokens of full blocks that are computed instead of loaded, by cause."""
        size = self._block_size
        at, usable = int(self._cache.num_computed_tokens(seq)) // size, (int(self._cache.num_tokens(seq)) - 1) // size
        parts = ((record.num_chosen, cause), (record.num_found, record.cause), (usable, record.rest_cause))
        for stop, why in parts:
            missing = min(stop, usable) - at
            if missing > 0:
                self._missed_tokens[why] += missing * size
                at += missing

    def _drop_load(self, load: PrefixLoad, is_copied: IsDone | None = None) -> None:
        """End a load for all of its requests. Rows of running transfers are freed when these end.

        is_copied: reports when the device has read the rows; None if it has.
        """
        if self._loads.get(load.names[load.first]) is not load:
            return
        del self._loads[load.names[load.first]]
        rows = []
        for transfer in load.all_transfers():
            transfer.is_dropped = True
            if transfer.is_done is not None:
                rows += transfer.rows
        if is_copied is None:
            self.free += rows
        else:
            self._context.copies.append(PendingCopy(is_copied, rows, lambda: self.free.extend(rows)))
        for key in load.keys:
            self._context.records[key].load = None
            self._context.records[key].waiting_since = self._context.clock()
        load.keys.clear()
