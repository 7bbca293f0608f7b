"""The manager: the two-phase life of sequences over one pool of blocks.

This is the door: here a call enters the gate, and what it is given is read and checked. First come the arguments whose
reading can run the caller's own code, then handles become rows, and `calls` gets typed values.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i64

from ..answers import (
    Admission,
    AllocationEvent,
    CacheStats,
    HintOutcome,
    Holding,
    MissCauses,
    Residency,
    Resize,
    RetentionEnds,
)
from ..arguments import require_bool, require_int, require_number, require_session, shown
from ..cache_options import MAX_BLOCKS
from ..config import CacheConfig
from ..errors import InvalidArgument, not_enough_memory
from ..kv_events import KVCacheEvents
from .arrays import view_i32
from .blocks.block import KVCacheBlock
from .blocks.eviction import wished_end, wished_policy, wished_priority
from .blocks.lease import BlockLease
from .calls.admission import LATER, NEVER
from .calls.allocate import REFUSED_FOR_NOW, REFUSED_FOREVER, AllocateCalls
from .calls.commit import CommitCalls
from .calls.counting import PromptCounts
from .calls.evict import EvictCalls, ResizeCalls
from .calls.fork import ForkCalls
from .calls.free import FreeCalls
from .calls.hints import HintCalls
from .calls.hold import HoldCalls
from .calls.in_flight import NO_STEP, in_flight_of
from .calls.reserve import ReserveCalls
from .calls.swap import SwapCalls, swap_calls
from .calls.truncate import TruncateCalls
from .face import read_bool, read_int, read_str, refuse_copy, refuse_pickle, refuse_subclass
from .index.contents import CachedContents
from .index.prompt import Prompt, make_prompt
from .inspection import Inspection
from .parts import Parts
from .plan.plans import StepPlan, SwapPlan
from .plan.tables import whole_table
from .pools.lease_pool import LeasePool
from .reading import (
    read_committed,
    read_ended,
    read_holders,
    read_prompts,
    read_state_hints,
)
from .sequences.block_table import BlockTable
from .sequences.table import is_batch, read_handle, read_handles
from .states import CacheStates
from .tokens import int64_items, int64_vector, token_table


class KVCacheManager:
    """Decides which block holds which token of which sequence; never touches a tensor.

    A sequence lives like this, and every call takes one handle or a whole batch of them:

        seq = cache.allocate(tokens)                 admission, prefix hit, blocks for the prompt
        plan = cache.reserve(seqs, num_new_tokens)   slots for the tokens about to be computed
        ...forward pass...
        cache.commit(seqs, num_computed, next_tokens)
        cache.free(seqs)

    A call either does all of its work or raises and changes nothing (I6). One call runs at a time: a `free` that
    arrives in the middle of another call, from a finaliser or a policy or another thread, waits until that ends, and
    any other call raises `ConcurrentCall`. Threads need a lock around their calls.

    >>> from blockyard import CacheConfig
    >>> cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
    >>> first = cache.allocate([1, 2, 3, 4, 5, 6])
    >>> plan = cache.reserve([first], 6)
    >>> plan.slot_mapping.tolist()
    [4, 5, 6, 7, 8, 9]
    >>> cache.commit([first], 6, [7])  # nothing was left out
    ()
    >>> second = cache.allocate([1, 2, 3, 4, 9])
    >>> cache.num_computed_tokens(second)
    4
    >>> cache.free([first, second])
    >>> cache.num_used_blocks
    0
    """

    def __init__(self, config: object) -> None:
        if not isinstance(config, CacheConfig):
            raise InvalidArgument(f"config is {shown(config)}; it must be a CacheConfig")
        try:
            self._build(config)
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {config.num_blocks}; the system has no memory for the cache", error)

    def _build(self, config: CacheConfig) -> None:
        self._parts = Parts(config)
        self._gate = self._parts.gate
        self._sequences = self._parts.sequences
        self._block_size = config.hash_block_size
        self._free = FreeCalls(self._parts)
        self._parts.gate.deferred.append(self._free)
        self._evict = EvictCalls(self._parts)
        self._hold = HoldCalls(self._parts)
        self._states = CacheStates(self._parts)
        self._hints = HintCalls(self._parts, self._evict.order)
        self._counts = PromptCounts(self._sequences, self._parts.misses)
        self._allocate = AllocateCalls(self._parts, self._free, self._hints, self._counts)
        self._in_flight = in_flight_of(self._parts)
        self._reserve = ReserveCalls(self._parts, self._in_flight)
        self._commit = CommitCalls(self._parts, self._in_flight, self._counts)
        self._fork = ForkCalls(self._parts, self._free, self._counts)
        self._truncate = TruncateCalls(self._parts, self._counts)
        self._swap = swap_calls(self._parts)
        self._resize = ResizeCalls(self._parts, self._allocate.admission)
        self._contents = CachedContents(self._parts.token_blocks.index, self._parts.config.hash_block_size)
        self._inspection = Inspection(self._parts, self._allocate, self._evict, self._hints)

    # Admission.

    def can_allocate(self, token_ids: object, *, extra_keys: object = (), num_seqs: object = 1) -> Admission:
        """Whether `allocate` would take this prompt: OK, LATER or NEVER. O(tokens). Changes nothing.

        The watermark counts as used, so that running sequences can grow without evicting one another.
        """
        self._gate.enter("can_allocate")
        try:
            count = read_int("num_seqs", num_seqs, 1, self._sequences.max_num_seqs)
            return self._allocate.can_allocate([self._prompt(token_ids, extra_keys)], count)
        finally:
            self._gate.leave()

    def allocate(
        self,
        token_ids: object,
        *,
        holder: object = "",
        extra_keys: object = (),
        num_seqs: object = 1,
        resumed: object = False,
        session: object = None,
        states: object = None,
    ) -> int:
        """Admit a prompt: hold the blocks of its longest cached prefix, and new blocks for the rest. O(tokens).

        Args:
            token_ids: the prompt, integers (n,): a list, an int32 or int64 array, a torch tensor, or any buffer.
            holder: a name for errors and leak reports.
            extra_keys: what else the keys and values depend on: LoRA, cache salt, spans (`blockyard.keys`).
            num_seqs: sequences that this prompt will be forked into (parallel sampling). Their request slots are set
                aside for `fork(seq, num_seqs - 1)`, and admission counts the blocks that they will copy first.
            resumed: True if the request ran before and was preempted. Its tokens then count neither as prompt nor as
                hit in `stats`.
            session: name of the session that the request continues, 1 to 200 characters, for `hint`. An earlier hint
                about the session no longer applies.
            states: for a cache with states, which ones to checkpoint or take from outside.

        Returns:
            The handle of the sequence. `num_computed_tokens(handle)` is the length of the hit: whole blocks (unless
            the config has `partial_hits`), and never the last token.

        Raises:
            OutOfBlocks: if the prompt does not fit now.
            OutOfRows: if all `max_num_seqs` request slots are taken.
            NeverFits: if the prompt does not fit the empty pool.
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("allocate")
        try:
            prompt = self._prompt_with(token_ids, extra_keys, states)
            return int(self._take_in(prompt, holder, num_seqs, resumed, session, True))
        finally:
            self._gate.leave_with_result()

    def try_allocate(
        self,
        token_ids: object,
        *,
        holder: object = "",
        extra_keys: object = (),
        num_seqs: object = 1,
        resumed: object = False,
        session: object = None,
        states: object = None,
    ) -> int | Admission:
        """Admit a prompt if it fits, else say whether to retry: one lookup for a scheduler's loop. O(tokens).

        Args:
            token_ids: the prompt, integers (n,).
            holder: a name for errors and leak reports.
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            num_seqs: sequences that this prompt will be forked into.
            resumed: True if the request ran before and was preempted.
            session: name of the session that the request continues.
            states: for a cache with states, which ones to checkpoint or take from outside.

        Returns:
            The handle of the sequence, or `Admission.LATER` or `Admission.NEVER`; then nothing has changed.

        Raises:
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("try_allocate")
        try:
            prompt = self._prompt_with(token_ids, extra_keys, states)
            handle = self._take_in(prompt, holder, num_seqs, resumed, session, False)
            if handle == REFUSED_FOR_NOW:
                return LATER
            return NEVER if handle == REFUSED_FOREVER else int(handle)
        finally:
            self._gate.leave_with_result()

    def _take_in(
        self, prompt: Prompt, holder: object, num_seqs: object, resumed: object, session: object, raises: bool
    ) -> i64:
        name = read_str("holder", holder)
        count = read_int("num_seqs", num_seqs, 1, self._sequences.max_num_seqs)
        again = read_bool("resumed", resumed)
        key = None if session is None else require_session("session", session)
        return self._allocate.allocate(prompt, name, count, again, key, raises)

    def _prompt_with(self, token_ids: object, extra_keys: object, states: object) -> Prompt:
        prompt = self._prompt(token_ids, extra_keys)
        if states is not None:
            if not self._parts.config.has_states:
                raise InvalidArgument("states is given; groups has no StateSpec: leave it out")
            read_state_hints(states, prompt, self._block_size)
        return prompt

    def _prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        return make_prompt(token_ids, extra_keys, self._block_size)

    def can_allocate_batch(self, prompts: object, *, extra_keys: object = ()) -> Admission:
        """Whether `allocate_batch` would take these prompts together: OK, LATER or NEVER. O(tokens)."""
        self._gate.enter("can_allocate_batch")
        try:
            return self._allocate.can_allocate(read_prompts(prompts, extra_keys, self._block_size), 1)
        finally:
            self._gate.leave()

    def allocate_batch(self, prompts: object, *, holders: object = (), extra_keys: object = ()) -> list[int]:
        """Admit several prompts, all or none. O(tokens).

        prompts: a list of what `allocate` takes. holders: as many names, or none. extra_keys: for all of them.
        What they begin with in common is taken once. Returns their handles. Raises as `allocate` does.
        """
        self._gate.enter("allocate_batch")
        try:
            made = read_prompts(prompts, extra_keys, self._block_size)
            return self._allocate.allocate_batch(made, read_holders(holders, len(made), ""))
        finally:
            self._gate.leave_with_result()

    def num_cached_tokens(self, token_ids: object, *, extra_keys: object = (), num_seqs: object = 1) -> int:
        """Return how many leading tokens of a prompt `allocate` would hit now, never the last one. O(tokens).

        A lookup that holds nothing and changes nothing, for routers and schedulers; with layer groups and a CPU pool
        it counts what every group can take. num_seqs: as in `allocate`. In a cache with states it can lower the hit: if
        the state does not fit beside the blocks that the forks will copy, it is not loaded.
        """
        self._gate.enter("num_cached_tokens")
        try:
            count = read_int("num_seqs", num_seqs, 1, self._sequences.max_num_seqs)
            return int(self._allocate.num_cached_tokens(self._prompt(token_ids, extra_keys), count))
        finally:
            self._gate.leave()

    def hold_cached(self, token_ids: object, *, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold what a prompt that begins with `token_ids` would hit now, maybe nothing: a lease of `pool`. O(tokens).

        For what must stay while no sequence holds it: a system prompt, blocks that a transfer reads. Full, computed
        blocks are held; with layer groups those of every group, group after group; not what lies in the CPU pool.
        `cache.pool.free_blocks(lease)` frees them. A policy takes it for a hit. Raises `InvalidArgument`.
        """
        self._gate.enter("hold_cached")
        try:
            return self._hold.hold_cached(self._prompt(token_ids, extra_keys), read_str("holder", holder))
        finally:
            self._gate.leave_with_result()

    # The step.

    def reserve(self, seqs: object, num_new_tokens: object = None) -> StepPlan:
        """Slots for the next `num_new_tokens` tokens of each sequence, the whole batch at once. O(batch + new tokens).

        seqs: handles (B,). num_new_tokens: integers (B,), or one for all; None for all that are known and not computed.
        0 is served with no slots. It may go past the known tokens (speculation); `commit` then names them. A new
        reservation of a sequence replaces an open one; where several steps may be in flight it begins behind those.
        Sequences are served in order; put the owner of joined blocks before its joiners (`core/sequences/joins.py`).
        One that cannot be served is reported in `plan.status`: it gets nothing and keeps what it has, and a
        reservation that would have been replaced ends.
        Returns the plan (`StepPlan`), whose status is SCHEDULED, NO_BLOCKS or WAITS_FOR_PREFIX.
        Raises `UnknownSequence`, `InvalidArgument`, `SequenceNotReady` for one that is swapped out, `PolicyError`, and
        `StepsInFlight` when `max_steps_in_flight` steps have not ended.
        """
        self._gate.enter("reserve")
        try:
            self._parts.kv_pool.act("reserve")
            given = read_handles(seqs)
            if num_new_tokens is None:
                return self._reserve.reserve_known(self._sequences.rows_of(given))
            counts = int64_vector("num_new_tokens", num_new_tokens, len(given))
            return self._reserve.reserve(self._sequences.rows_of(given), counts)
        finally:
            self._gate.leave_with_result()
            self._sequences.has_new_plan = False

    def commit(
        self, seqs: object, num_computed: object, next_tokens: object = None, *, step: object = None
    ) -> tuple[int, ...]:
        """Say what the step did: the first `num_computed` reserved tokens of each sequence are computed. O(batch).

        num_computed: integers (B,), or one for all, at most what was reserved; 0 says that the step failed.
        next_tokens: tokens to append, integers (B,) or (B, k) with -1 for none, or a list of lists, which may differ in
        length, as accepted drafts do. All known tokens but the last
        must have a block; with num_computed=0 this only appends, as after a fork.
        Full computed blocks become shareable. The reservation ends.
        step: `plan.step`, where several steps may be in flight. The steps of a sequence are committed in their order.
        If less is computed than was reserved, later reservations of that sequence end: commit 0 tokens for them.
        Returns the sequences whose reservation had ended since `reserve`, because a sequence was freed whose prefix
        they joined: nothing of them was taken, and they must be reserved again. Usually none.
        Raises `UnknownSequence`, `SequenceNotReady` or `InvalidArgument`.
        """
        self._gate.enter("commit")
        try:
            self._parts.kv_pool.act("commit")
            number = read_committed(step, self._in_flight)
            return self._commit_read(seqs, num_computed, next_tokens, number)
        finally:
            self._gate.leave()

    def end_step(self, step: object) -> None:
        """No device writes or reads any more for steps up to `step`, an integer, `plan.step`. O(blocks that waited).

        Until then the blocks that sequences of these steps released (by `free`, `truncate`, a swap, or a sliding
        window) are held, and given to no other: `num_fenced_blocks`.
        Raises `InvalidArgument` unless the step is in flight, and `SequenceNotReady` while a reservation of these steps
        is not committed.
        """
        self._gate.enter("end_step")
        try:
            self._parts.kv_pool.act("end_step")
            if self._in_flight is None:
                raise InvalidArgument("end_step: max_steps_in_flight is 1; steps have numbers with 2 or more")
            self._in_flight.end(read_ended(step, self._in_flight))
        finally:
            self._gate.leave()

    @property
    def steps_in_flight(self) -> range:
        """Numbers of the steps that were reserved and have not ended; none where only one may be in flight. O(1)."""
        if self._in_flight is None:
            return range(1, 1)
        fence = self._in_flight.fence
        return range(int(fence.num_ended) + 1, int(fence.num_begun) + 1)

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that sequences released and that wait for a step to end; most are free then. O(1)."""
        return 0 if self._in_flight is None else int(self._in_flight.fence.num_blocks)

    def can_append(self, seqs: object, num_new_tokens: object = 1) -> bool:
        """Whether `reserve` would serve all of `seqs` now. O(batch). Changes nothing.

        Cautious by a block where several forks that share their last block are asked about together, and where one
        waits for blocks that another would compute in the same step. False while no further step may be in flight.
        """
        self._gate.enter("can_append")
        try:
            given = read_handles(seqs)
            counts = int64_vector("num_new_tokens", num_new_tokens, len(given))
            return self._reserve.can_append(self._sequences.rows_of(given), counts)
        finally:
            self._gate.leave()

    def append(self, seqs: object, next_tokens: object) -> None:
        """Append tokens to sequences without computing anything: `commit(seqs, 0, next_tokens)`. O(batch).

        An open reservation of theirs ends, as with any commit: append before `reserve`, or name the tokens in `commit`.
        """
        self._gate.enter("append")
        try:
            self._parts.kv_pool.act("append")
            self._commit_read(seqs, 0, next_tokens, NO_STEP)
        finally:
            self._gate.leave()

    def _commit_read(self, seqs: object, num_computed: object, next_tokens: object, step: i64) -> tuple[int, ...]:
        given = read_handles(seqs)
        counts = int64_vector("num_computed", num_computed, len(given))
        table = token_table("next_tokens", next_tokens, len(given))
        return self._commit.commit(self._sequences.rows_of(given), counts, table, step)

    # Forks, cuts, the end.

    def fork(self, seq: object, num_forks: object = 1, *, holders: object = ()) -> list[int]:
        """New sequences that share all blocks of `seq`; the first to write gets a copy (CoW). O(blocks * forks).

        holders: a name for each; that of `seq` if there are none. Returns their handles. Raises `SequenceNotReady`
        unless all tokens of `seq` but possibly the last are computed and nothing is reserved; `OutOfRows`;
        `InvalidArgument` for a count below 1, or another number of names.
        """
        self._gate.enter("fork")
        try:
            self._parts.kv_pool.act("fork")
            handle = read_handle(seq)
            count = read_int("num_forks", num_forks, 1, self._sequences.max_num_seqs)
            names = read_holders(holders, count, None)
            return self._fork.fork(self._sequences.live_row(handle), count, names)
        finally:
            self._gate.leave_with_result()

    def regroup(self, seqs: object, parents: object) -> list[int]:
        """Beam search's step: sequence i becomes a continuation of `seqs[parents[i]]`. O(blocks of forks and drops).

        parents: positions in `seqs`, integers (n,), n of any length. The first child of a sequence is that sequence
        itself, the others are forks of it; sequences without a child are freed. Returns n handles in the order of
        `parents`. Raises as `fork` does for sequences with several children.
        """
        self._gate.enter("regroup")
        try:
            self._parts.kv_pool.act("regroup")
            given = read_handles(seqs)
            chosen = int64_items("parents", parents)
            return self._fork.regroup(self._sequences.rows_of(given), chosen)
        finally:
            self._gate.leave_with_result()

    def truncate(self, seq: object, num_tokens: object) -> None:
        """Forget all but the first `num_tokens` tokens, and free the blocks behind them. O(blocks freed).

        Raises `SequenceNotReady` while something is reserved or the prompt is not computed, and `InvalidArgument`
        unless 1 <= num_tokens <= the sequence's tokens, or when blocks that lie in the sliding window before the cut
        were freed already.
        """
        self._gate.enter("truncate")
        try:
            self._parts.kv_pool.act("truncate")
            handle = read_handle(seq)
            limit = self._sequences.num_tokens[self._sequences.live_row(handle)]
            length = read_int("num_tokens", num_tokens, 1, limit)
            self._truncate.truncate(self._sequences.live_row(handle), length)
        finally:
            self._gate.leave()

    def free(self, seqs: object) -> None:
        """End sequences, one handle or many, and free their blocks, last block first. O(blocks).

        Cached blocks stay hittable until they are evicted. A free that arrives in the middle of another call is carried
        out when that call ends. Raises `UnknownSequence` for a handle that was freed already, is another manager's or
        was never given; then none is freed.
        """
        given = read_handles(seqs)
        if not self._gate.enter_free("free"):
            self._free.free_later(given)
            self._gate.wait()
            return
        try:
            self._free.free(self._sequences.rows_of(given))
        finally:
            self._gate.leave()

    # The CPU pool.

    def swap_out(self, seqs: object) -> SwapPlan:
        """Move sequences to the CPU pool, all or none: their blocks are free, their handles stay. O(blocks).

        Carry out the plan before the next step. Blocks that only hold tokens yet to be computed are given up. A
        sequence keeps its row; until `swap_in` it cannot be reserved for, but forked, cut, appended to and freed.
        If its first step has not run, what that step was to copy of a block is computed instead; the state that it was
        to load is looked up again by `swap_in`, and if it was evicted, the prompt is computed from the beginning.
        Evicted blocks that no plan has saved yet keep their CPU blocks until one does.
        Raises `OutOfBlocks` when the CPU pool has too few free blocks, `SequenceNotReady` while tokens are reserved
        or when one is swapped out already, `InvalidArgument` without a CPU pool.
        """
        self._gate.enter("swap_out")
        try:
            self._parts.kv_pool.act("swap_out")
            swap = self._require_swap("swap_out")
            return swap.swap_out(self._rows_of(seqs))
        finally:
            self._gate.leave_with_result()

    def swap_in(self, seqs: object) -> SwapPlan:
        """Bring sequences back, all or none. What the pool still caches of them is shared, not moved. O(blocks).

        Carry out the plan before the next step. Raises `OutOfBlocks`, `SequenceNotReady` for one that is not swapped
        out, `InvalidArgument` without a CPU pool.
        """
        self._gate.enter("swap_in")
        try:
            self._parts.kv_pool.act("swap_in")
            swap = self._require_swap("swap_in")
            return swap.swap_in(self._rows_of(seqs))
        finally:
            self._gate.leave_with_result()

    def can_swap_out(self, seqs: object) -> bool:
        """Whether `swap_out` would move all of `seqs` now. O(blocks). Changes nothing.

        Raises `UnknownSequence`, and `InvalidArgument` without a CPU pool.
        """
        self._gate.enter("can_swap_out")
        try:
            swap = self._require_swap("can_swap_out")
            return swap.can_swap_out(self._rows_of(seqs))
        finally:
            self._gate.leave()

    def can_swap_in(self, seqs: object) -> bool:
        """Whether `swap_in` would bring all of `seqs` back now; as `can_swap_out`."""
        self._gate.enter("can_swap_in")
        try:
            swap = self._require_swap("can_swap_in")
            return swap.can_swap_in(self._rows_of(seqs))
        finally:
            self._gate.leave()

    def _require_swap(self, call: str) -> SwapCalls:
        if self._swap is None:
            raise InvalidArgument(f"{call}: num_cpu_blocks is 0; a CPU pool is needed")
        return self._swap

    def _rows_of(self, seqs: object) -> vec[i64]:
        return self._sequences.rows_of(read_handles(seqs))

    # The pool at run time.

    def resize(self, num_blocks: object = 0, *, num_bytes: object = None) -> Resize:
        """Grow the pool, or shrink it, while sequences run. O(num_blocks). Never moves a block that is in use.

        Growing is done at once. Shrinking evicts what is idle beyond the new end; DEFERRED says that blocks there are
        still held (`pool.num_retiring_blocks`) and go when they are freed. The KV tensors are the caller's to
        resize: after growing before the next step; after shrinking once nothing retires any more and the plan made
        after that (`reserve`, of nothing if need be) is carried out, because it may still move blocks beyond the end.
        num_bytes: the size in bytes instead (`CacheConfig.blocks_in`), of a cache whose groups have token_bytes. Raises
        `InvalidArgument` for a size outside 2 to 2**27, `NotEnoughMemory` where the system has none.
        """
        self._gate.enter("resize")
        try:
            if num_bytes is not None:
                if type(num_blocks) is not int or num_blocks != 0:
                    raise InvalidArgument(
                        f"num_blocks is {shown(num_blocks)} and num_bytes is {shown(num_bytes)}; give one of the two"
                    )
                size = self.config.blocks_in(num_bytes)
            else:
                size = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
            answer = self._resize.resize(size)
            self._gate.note_change()
            return answer
        finally:
            self._gate.leave()

    def set_eviction_policy(self, policy: object) -> None:
        """Let another policy choose what is evicted: a name, or a class or callable that makes one from num_blocks.

        What retention holds back it holds back no longer. O(num_blocks). Raises `InvalidArgument`.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._evict.order.install(wished_policy(policy, self._parts.kv_pool))
        finally:
            self._gate.leave()

    def retain(
        self, token_ids: object, *, priority: object = 1, expires_at: object = None, extra_keys: object = ()
    ) -> int:
        """Ask that the cached blocks `token_ids` begins with be evicted after all others. O(blocks * log retained).

        A wish, not a pin: retained blocks go when nothing else is idle, the lowest priority first. Call it again
        to change the priority, with 0 to take the wish back. priority: 0 to 2**20. expires_at: the logical time at
        which the wish ends (`advance_time`), None for never. Returns how many blocks it concerns.
        Raises `OverBudget` when more than `retention_blocks` blocks would be retained, and `InvalidArgument` if the
        config has no budget.
        """
        self._gate.enter("retain")
        try:
            prompt = self._prompt(token_ids, extra_keys)
            level = wished_priority(priority)
            return self._evict.retain(prompt, level, wished_end(expires_at))
        finally:
            self._gate.leave()

    def num_retained_of(self, token_ids: object, *, extra_keys: object = ()) -> int:
        """Count the cached blocks `token_ids` begins with that `retain` keeps now. O(tokens + blocks).

        Fewer than `retain` answered: the retention of the others has ended; `ended_retentions` counts why.
        """
        self._gate.enter("num_retained_of")
        try:
            return self._evict.num_retained_of(self._prompt(token_ids, extra_keys))
        finally:
            self._gate.leave()

    def hint(self, target: object, *, over: object = False) -> HintOutcome:
        """Say that a session is over, or take that back. O(log sessions).

        target: the session's name, or a running sequence, which needs no name. over: whether the session does not come
        back; what it alone has used is then evicted before all else. A hint changes the order in which idle blocks are
        evicted, and nothing else. Returns what became of it (`HintOutcome`). Raises `InvalidArgument`, and
        `UnknownSequence` for a sequence that has ended.
        """
        self._gate.enter("hint")
        try:
            is_over = require_bool("over", over)
            if isinstance(target, str):
                return self._hints.hint_name(require_session("target", target), is_over)
            if isinstance(target, bool) or not isinstance(target, (int, np.integer)):
                raise InvalidArgument(f"target is {shown(target)}; a session's name or a sequence is needed")
            return self._hints.hint_row(self._sequences.row_of(target), is_over)
        finally:
            self._gate.leave()

    @property
    def num_sessions(self) -> int:
        """Sessions that are known, at most `max_sessions`. O(1)."""
        return self._hints.num_sessions()

    def advance_time(self, now: object) -> None:
        """Tell the cache what time it is, in any unit: for expiries, residency and the history. It never goes back.

        Raises `InvalidArgument` for a time before the last one.
        """
        self._gate.enter("advance_time")
        try:
            self._evict.order.advance(require_number("now", now))
        finally:
            self._gate.leave()

    def reset_prefix_cache(self) -> None:
        """No cached block hits any more, from now on; sequences may run, and go on without publishing. O(num_blocks).

        For new weights: keys and values of the old ones must not serve new requests.
        """
        self._gate.enter("reset_prefix_cache")
        try:
            self._evict.reset_prefix_cache()
            self._gate.note_change()
        finally:
            self._gate.leave()

    # Sequences.

    def num_tokens(self, seqs: object) -> Any:
        """Known tokens: of one sequence an int, of several an int64 array (B,). O(B)."""
        return self._number_of("num_tokens", self._sequences.num_tokens, seqs)

    def num_computed_tokens(self, seqs: object) -> Any:
        """Tokens whose keys and values are there, or will be when the sequence gets its slots; as `num_tokens`."""
        return self._number_of("num_computed_tokens", self._sequences.num_computed, seqs)

    def _number_of(self, call: str, column: vec[i64], seqs: object) -> object:
        if not is_batch(seqs):
            return int(column[self._sequences.row_of(seqs)])
        self._gate.enter(call)
        try:
            return self._inspection.column(column, self._rows_of(seqs))
        finally:
            self._gate.leave()

    def token_ids(self, seq: object) -> npt.NDArray[np.int32]:
        """The known tokens of a sequence, int32 (num_tokens,), a copy. O(tokens)."""
        self._gate.enter("token_ids")
        try:
            return self._inspection.token_ids(self._sequences.row_of(seq))
        finally:
            self._gate.leave()

    def block_ids(self, seq: object, group: object = 0) -> npt.NDArray[np.int32]:
        """The blocks of a sequence in order, int32 (n,), a copy. O(blocks). 0 stands behind a sliding window."""
        self._gate.enter("block_ids")
        try:
            table = self._table(group)
            return view_i32(table.row_blocks(self._sequences.row_of(seq)))
        finally:
            self._gate.leave()

    def num_owned_blocks(self, seqs: object) -> npt.NDArray[np.int64]:
        """Blocks that each sequence holds alone, int64 (B,): what preempting it would free. O(blocks)."""
        self._gate.enter("num_owned_blocks")
        try:
            return self._inspection.num_owned_blocks(self._rows_of(seqs))
        finally:
            self._gate.leave()

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """All rows, int32 (max_num_seqs, blocks of max_model_len), padded with 0: read-only, live, without a copy.

        The first layer group's, where there are several; see `group_table`.
        """
        return whole_table(self._parts.store.tables[0])

    def group_table(self, group: object) -> npt.NDArray[np.int32]:
        """`block_table` of one layer group."""
        return whole_table(self._table(group))

    def _table(self, group: object) -> BlockTable:
        tables = self._parts.store.tables
        return tables[require_int("group", group, 0, len(tables) - 1)]

    def is_swapped_out(self, seq: object) -> bool:
        """Whether a sequence's blocks are in the CPU pool. O(1)."""
        return self._sequences.is_swapped[self._sequences.row_of(seq)] != 0

    @property
    def num_seqs(self) -> int:
        """Running sequences. O(1)."""
        return int(self._sequences.num_live_rows())

    def running(self) -> dict[int, str]:
        """The running sequences and their holders: at the end of work, the leak report. O(max_num_seqs)."""
        self._gate.enter("running")
        try:
            return self._inspection.running()
        finally:
            self._gate.leave()

    # Blocks.

    @property
    def config(self) -> CacheConfig:
        """The config that the cache was built from."""
        return self._parts.config

    @property
    def pool(self) -> LeasePool:
        """The pool of blocks that have keys and values."""
        return self._parts.pool

    @property
    def contents(self) -> CachedContents:
        """What prompts can hit, to be read a slice at a time."""
        return self._contents

    @property
    def cpu_pool(self) -> LeasePool | None:
        """The CPU pool; None without one."""
        return self._parts.cpu_pool

    @property
    def states(self) -> CacheStates:
        """Calls on the states of a hybrid model: where they are, and which the caller supplies."""
        return self._states

    @property
    def block_size(self) -> int:
        """Tokens that are hashed and compared together; of a cache without layer groups, tokens a block."""
        return int(self._parts.block_size)

    @property
    def generation(self) -> int:
        """How often the cache was reset. A block of an earlier generation never hits. O(1)."""
        return int(self._parts.token_blocks.index.num_generations)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included. O(1)."""
        return self._parts.pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences or leases hold. O(1)."""
        return self._parts.pool.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prompt can hit. O(1)."""
        return self._parts.pool.num_cached_blocks

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that `retain` keeps now, held or idle; 0 without a budget. O(1)."""
        return self._evict.order.num_retained

    @property
    def num_held_by_tenant(self) -> npt.NDArray[np.int64]:
        """Blocks that each tenant holds, int64 (tenants,), a copy, in the order of `stats().tenants`. O(tenants)."""
        return self._inspection.num_held_by_tenant()

    @property
    def ended_retentions(self) -> RetentionEnds:
        """Count the blocks whose retention has ended so far, by cause. O(1)."""
        return self._evict.order.ended_retentions()

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1. O(1)."""
        return self._parts.pool.usage

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as shown to callers, with the sequences that hold it. O(all held blocks)."""
        number = require_int("block_id", block_id, 0, int(self._parts.kv_pool.capacity) - 1)
        self._gate.enter("block")
        try:
            return self._inspection.block(number)
        finally:
            self._gate.leave()

    def stats(self) -> CacheStats:
        """Counters since the start and the state now. O(max_num_seqs). It may be asked at any time."""
        return self._inspection.stats()

    # What happened, and why.

    def miss_causes(self, seq: object) -> MissCauses:
        """Return what became of the tokens of a sequence's prompt, by cause. O(1).

        As `allocate` found it; if the producer of a hit leaves before it has computed the hit, from the sequence's
        first `commit` on without it. Raises `InvalidArgument` unless the config says `track_misses=True`.
        """
        return self._inspection.miss_causes(self._sequences.row_of(seq))

    def miss_totals(self) -> MissCauses:
        """Return the same for all prompts that have begun to compute (`stats`). O(1)."""
        return self._inspection.miss_totals()

    def history(self) -> list[AllocationEvent]:
        """The latest `history_size` events of the pool, oldest first. O(history_size). Empty when it is off."""
        self._gate.enter("history")
        try:
            return [] if self._parts.history is None else self._parts.history.events()
        finally:
            self._gate.leave()

    def residency(self) -> Residency:
        """How long sampled blocks live, lie idle and wait for reuse. O(1).

        Raises `InvalidArgument` unless the config has a `residency_sample`.
        """
        return self._inspection.residency()

    def take_events(self) -> KVCacheEvents:
        """What prompts can hit, and can hit no more, since the last call (vLLM's `take_events`). O(what happened).

        Called after each step, it costs nothing that grows with the pool. Nothing is lost if it is called less often: a
        content that came and went in between is left out, and the log never holds more than four entries a block.
        Raises `InvalidArgument` unless the config says `enable_kv_cache_events=True`.
        """
        self._gate.enter("take_events")
        try:
            return self._inspection.take_events()
        finally:
            self._gate.leave_with_result()

    def leak_report(self) -> list[Holding]:
        """Who holds which blocks now: sequences, swapped ones included, and leases. O(held blocks).

        At the end of work, what it names was not freed. It changes nothing and ends nothing.
        """
        self._gate.enter("leak_report")
        try:
            return self._inspection.leak_report()
        finally:
            self._gate.leave()

    def check(self) -> None:
        """Verify every invariant of the live manager (`checking`). O(num_blocks + table). Raises `InvariantError`."""
        self._gate.enter("check")
        try:
            self._inspection.check()
        finally:
            self._gate.leave()

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        raise refuse_subclass("KVCacheManager")

    def __repr__(self) -> str:
        pool = self._parts.kv_pool
        used = f"{pool.num_used_blocks} of {pool.num_usable_blocks} blocks used, {pool.num_cached_blocks} cached"
        running = f"{self.num_seqs} {'sequence' if self.num_seqs == 1 else 'sequences'}"
        return f"<KVCacheManager: {running}, {used}, {pool.num_free_blocks} free>"

    def __copy__(self) -> "KVCacheManager":
        raise refuse_copy("a KVCacheManager", "make another one from its config")

    def __deepcopy__(self, memo: object) -> "KVCacheManager":
        raise refuse_copy("a KVCacheManager", "make another one from its config")

    def __reduce__(self) -> str:
        raise refuse_pickle("a KVCacheManager", "make one from its config in the other process")
