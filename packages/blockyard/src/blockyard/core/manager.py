"""The manager: admits sequences, reserves their slots step by step, and frees their blocks.

`KVCacheManager` enters the gate, checks arguments and converts them; `calls` does the work with typed values. Arguments
whose conversion can run the caller's own code are read before handles are turned into rows.
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
from .blocks.eviction import read_expiry, read_priority, resolve_policy
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
from .calls.in_flight import NO_STEP, InFlight, steps_of
from .calls.reserve import ReserveCalls
from .calls.swap import SwapCalls, swap_calls
from .calls.truncate import TruncateCalls
from .calls.waiting import ManagerLookups
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
from .waiting.queue import WaitingQueue
from .waiting.requests import WaitingRequests


class KVCacheManager:
    """Maps the tokens of each sequence to blocks. It never touches a tensor.

    The life of a sequence; every call takes one handle or a whole batch:

        seq = cache.allocate(tokens)                 # admission, prefix hit, blocks for the prompt
        plan = cache.reserve(seqs, num_new_tokens)   # slots for the tokens of the next step
        ...                                          # the forward pass
        cache.commit(seqs, num_computed, next_tokens)
        cache.free(seqs)

    A call does all of its work, or raises and changes nothing (I6). One call runs at a time. A `free` that arrives
    during another call, from a finaliser, a policy or another thread, is carried out when that call ends; any other
    call raises `ConcurrentCall`. Give threads a lock.

    Args:
        config: size and options of the cache.

    Raises:
        InvalidArgument: if `config` is not a `CacheConfig`.
        NotEnoughMemory: if the system has no memory for the cache.
        PolicyError: if making the eviction policy raises.

    >>> from blockyard import CacheConfig
    >>> cache = KVCacheManager(CacheConfig(num_blocks=100, block_size=4))
    >>> first = cache.allocate([1, 2, 3, 4, 5, 6])
    >>> plan = cache.reserve([first], 6)
    >>> plan.slot_mapping.tolist()
    [4, 5, 6, 7, 8, 9]
    >>> cache.commit([first], 6, [7])  # no reservation had ended
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
        self._steps = steps_of(self._parts)
        self._reserve = ReserveCalls(self._parts, self._steps)
        self._commit = CommitCalls(self._parts, self._steps, self._counts)
        self._fork = ForkCalls(self._parts, self._free, self._counts)
        self._truncate = TruncateCalls(self._parts, self._counts)
        self._swap = swap_calls(self._parts)
        self._resize = ResizeCalls(self._parts, self._allocate.admission)
        self._contents = CachedContents(self._parts.token_blocks.index, self._parts.config.hash_block_size)
        self._inspection = Inspection(self._parts, self._allocate, self._evict, self._hints)
        self._waiting: WaitingQueue | None = None

    # Admission.

    def can_allocate(self, token_ids: object, *, extra_keys: object = (), num_seqs: object = 1) -> Admission:
        """Return whether `allocate` would admit this prompt now. Changes nothing. O(tokens).

        Blocks below the watermark count as used, so that running sequences can grow.

        Args:
            token_ids: the prompt, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            num_seqs: sequences that the prompt will be forked into.

        Returns:
            OK, LATER (not enough free blocks or request slots now) or NEVER (it does not fit the empty pool).

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("can_allocate")
        try:
            count = read_int("num_seqs", num_seqs, 1, self._sequences.max_num_seqs)
            return self._allocate.can_allocate(self._prompt(token_ids, extra_keys), count)
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
                raise InvalidArgument(
                    "states is given, but the cache has no states (groups has no StateSpec): leave it out"
                )
            read_state_hints(states, prompt, self._block_size)
        return prompt

    def _prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        return make_prompt(token_ids, extra_keys, self._block_size)

    def can_allocate_batch(self, prompts: object, *, extra_keys: object = ()) -> Admission:
        """Return whether `allocate_batch` would admit these prompts together: OK, LATER or NEVER. O(tokens).

        Args:
            prompts: a list of prompts, integers (n,) each.
            extra_keys: what else the keys and values of all of them depend on.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("can_allocate_batch")
        try:
            return self._allocate.can_allocate_batch(read_prompts(prompts, extra_keys, self._block_size))
        finally:
            self._gate.leave()

    def allocate_batch(self, prompts: object, *, holders: object = (), extra_keys: object = ()) -> list[int]:
        """Admit several prompts, all or none. A common beginning takes its blocks once. O(tokens).

        Args:
            prompts: a list of prompts, integers (n,) each.
            holders: a name for each, for errors and leak reports; empty for no names.
            extra_keys: what else the keys and values of all of them depend on.

        Returns:
            Their handles, in order.

        Raises:
            OutOfBlocks: if they do not fit together now.
            OutOfRows: if there are too few request slots.
            NeverFits: if they do not fit the empty pool together.
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("allocate_batch")
        try:
            made = read_prompts(prompts, extra_keys, self._block_size)
            return self._allocate.allocate_batch(made, read_holders(holders, len(made), ""))
        finally:
            self._gate.leave_with_result()

    def num_cached_tokens(self, token_ids: object, *, extra_keys: object = (), num_seqs: object = 1) -> int:
        """Return the length of the hit that `allocate` would find now; never all tokens. Holds nothing. O(tokens).

        For routers and schedulers. With layer groups or a CPU pool, only tokens that every group can load are counted.

        Args:
            token_ids: the prompt, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            num_seqs: sequences that the prompt will be forked into. In a cache with states more of them can shorten the
                hit: a state that does not fit besides the blocks that the forks copy is not loaded.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("num_cached_tokens")
        try:
            count = read_int("num_seqs", num_seqs, 1, self._sequences.max_num_seqs)
            return int(self._allocate.num_cached_tokens(self._prompt(token_ids, extra_keys), count))
        finally:
            self._gate.leave()

    def waiting(self) -> WaitingQueue:
        """Return the index of waiting requests, made at the first call. It costs nothing before that. O(1).

        Raises:
            NotEnoughMemory: if the system has no memory for it.
        """
        self._gate.enter("waiting")
        try:
            if self._waiting is None:
                lookups = ManagerLookups(self._parts, self._allocate)
                self._waiting = WaitingQueue(WaitingRequests(self._gate, lookups))
            return self._waiting
        finally:
            self._gate.leave()

    def hold_cached(self, token_ids: object, *, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold the cached blocks at the beginning of a prompt, without a sequence. O(tokens).

        For blocks that must stay while no sequence holds them: a system prompt, or blocks that a transfer reads. Only
        full, computed blocks of the pool are held, not those of the CPU pool; with layer groups, those of every group,
        one group after another. The eviction policy counts it as a hit.

        Args:
            token_ids: the prompt, integers (n,). All of it may be held.
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            holder: a name for errors and leak reports.

        Returns:
            A lease of `pool`, possibly empty. `cache.pool.free_blocks(lease)` frees it.

        Raises:
            OutOfBlocks: if the tenant's limit, or the guarantees of other tenants, forbid it.
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("hold_cached")
        try:
            return self._hold.hold_cached(self._prompt(token_ids, extra_keys), read_str("holder", holder))
        finally:
            self._gate.leave_with_result()

    # The step.

    def reserve(self, seqs: object, num_new_tokens: object = None) -> StepPlan:
        """Reserve slots for the next tokens of each sequence, for the whole batch at once. O(batch + new tokens).

        It may reserve past the known tokens (speculation); `commit` then appends them. A new reservation of a sequence
        replaces an open one; with several steps in flight it follows those. Sequences are served in order: put the
        producer of a shared prefix before those that wait for it. A sequence that cannot be served keeps its blocks and
        loses an open reservation; `plan.status` says why.

        Args:
            seqs: handles (B,).
            num_new_tokens: tokens to reserve for each, integers (B,), or one number for all; 0 is allowed. None
                reserves all known tokens that are not computed.

        Returns:
            The plan of the step. `plan.status` is SCHEDULED, NO_BLOCKS or WAITS_FOR_PREFIX for each sequence.

        Raises:
            UnknownSequence: if a sequence is not running.
            SequenceNotReady: if a sequence is swapped out.
            StepsInFlight: if `max_steps_in_flight` steps have not ended.
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
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
        """Record how many tokens a step computed and append the sampled tokens. The reservations end. O(batch).

        Full computed blocks can be hit from now on.

        Args:
            seqs: handles (B,).
            num_computed: number of reserved tokens that were computed, counted from the first: integers (B,), or one
                number for all; 0 if the step failed.
            next_tokens: tokens to append: integers (B,), (B, k) with -1 for none, or a list of lists of any lengths
                (accepted drafts). All known tokens but the last must have a block.
            step: `plan.step`, with `max_steps_in_flight` above 1. Commit the steps of a sequence in order. If less was
                computed than reserved, later reservations of that sequence end: commit 0 tokens for them.

        Returns:
            Sequences whose reservation had ended before, because a sequence that computed a prefix for them was freed.
                Nothing was recorded for them: reserve again. Usually empty.

        Raises:
            UnknownSequence: if a sequence is not running.
            SequenceNotReady: if a sequence is swapped out, or has no blocks for its known tokens.
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("commit")
        try:
            self._parts.kv_pool.act("commit")
            number = read_committed(step, self._steps)
            return self._commit_read(seqs, num_computed, next_tokens, number)
        finally:
            self._gate.leave()

    def end_step(self, step: object) -> None:
        """Record that the device has finished all steps up to `step`. O(blocks that waited).

        With `max_steps_in_flight` above 1, blocks that sequences of these steps released (`free`, `truncate`, swaps,
        sliding windows) are reused only then (`num_fenced_blocks`).

        Args:
            step: `plan.step` of the last finished step.

        Raises:
            SequenceNotReady: while a reservation of these steps is not committed.
            InvalidArgument: if the step is not in flight.
        """
        self._gate.enter("end_step")
        try:
            self._parts.kv_pool.act("end_step")
            steps = self._steps
            if not isinstance(steps, InFlight):
                raise InvalidArgument(
                    f"step is {shown(step)}; steps are not numbered unless max_steps_in_flight > 1: leave out end_step"
                )
            steps.end(read_ended(step, steps))
        finally:
            self._gate.leave()

    @property
    def steps_in_flight(self) -> range:
        """Numbers of the steps that were reserved and have not ended; empty with `max_steps_in_flight=1`. O(1)."""
        steps = self._steps
        if not isinstance(steps, InFlight):
            return range(1, 1)
        return range(int(steps.fence.num_ended) + 1, int(steps.fence.num_begun) + 1)

    @property
    def num_fenced_blocks(self) -> int:
        """Released blocks that wait for a step to end before they can be reused. O(1)."""
        return int(self._parts.kv_pool.fence.num_blocks)

    def can_append(self, seqs: object, num_new_tokens: object = 1) -> bool:
        """Return whether `reserve` would serve all of `seqs` now. Changes nothing. O(batch).

        It may return False although `reserve` would succeed, for lack of one block: for forks that share their last
        block, and for a sequence that waits for blocks which another one would compute in the same step.

        Args:
            seqs: handles (B,).
            num_new_tokens: tokens to reserve for each, integers (B,), or one number for all.

        Returns:
            True if all would be served; False also while no further step may be in flight.

        Raises:
            UnknownSequence: if a sequence is not running.
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("can_append")
        try:
            given = read_handles(seqs)
            counts = int64_vector("num_new_tokens", num_new_tokens, len(given))
            return self._reserve.can_append(self._sequences.rows_of(given), counts)
        finally:
            self._gate.leave()

    def append(self, seqs: object, next_tokens: object) -> None:
        """Append tokens to sequences without computing anything. O(batch).

        The same as `commit(seqs, 0, next_tokens)`: an open reservation ends. Append before `reserve`.

        Args:
            seqs: handles (B,).
            next_tokens: tokens to append, as in `commit`.

        Raises:
            UnknownSequence: if a sequence is not running.
            SequenceNotReady: if a sequence has no blocks for its known tokens.
            InvalidArgument: if an argument is outside its limits.
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
        """Create sequences that share all blocks of `seq`. The first write into a block copies it. O(blocks * forks).

        Args:
            seq: handle of the sequence to fork.
            num_forks: number of new sequences.
            holders: a name for each; empty for the name of `seq`.

        Returns:
            Their handles.

        Raises:
            SequenceNotReady: if tokens of `seq` other than the last are not computed, or some are reserved.
            OutOfRows: if there are too few request slots.
            InvalidArgument: if an argument is outside its limits.
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
        """Continue the chosen beams of a beam search: result i continues `seqs[parents[i]]`. O(blocks).

        The first child of a sequence is the sequence itself, further ones are forks of it. Sequences without a child
        are freed.

        Args:
            seqs: handles (B,).
            parents: positions in `seqs`, integers (n,), in any order and number.

        Returns:
            n handles, in the order of `parents`.

        Raises:
            SequenceNotReady: as `fork`, for a sequence with several children.
            OutOfRows: if there are too few request slots.
            InvalidArgument: if an argument is outside its limits.
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
        """Drop all but the first `num_tokens` tokens of a sequence, and free their blocks. O(blocks freed).

        Args:
            seq: handle of the sequence.
            num_tokens: tokens to keep, at least 1.

        Raises:
            SequenceNotReady: while tokens are reserved, or before the prompt is computed.
            InvalidArgument: if `num_tokens` is outside its limits, or blocks in the sliding window before the cut have
                been freed already.
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
        """End sequences and free their blocks, last block first. O(blocks).

        Cached blocks can be hit until they are evicted. During another call the sequences are freed when that call
        ends.

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            UnknownSequence: if a sequence is not running, because it was freed before or belongs to another manager;
                then none is freed.
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
        """Move the blocks of sequences to the CPU pool, all or none. Their blocks are free then. O(blocks).

        Carry out the plan before the next step. Blocks for tokens that are not computed are freed. A sequence keeps its
        handle and request slot. Until `swap_in` it cannot be reserved for, but it can be forked, truncated, appended to
        and freed. If its first step has not run yet, a partial hit is computed instead of copied, and `swap_in` looks
        up the state that the step would have loaded; if that was evicted, the prompt is computed from the beginning.

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            OutOfBlocks: if the CPU pool has too few free blocks.
            SequenceNotReady: if tokens are reserved, or a sequence is swapped out already.
            UnknownSequence: if a sequence is not running.
            InvalidArgument: if there is no CPU pool.
        """
        self._gate.enter("swap_out")
        try:
            self._parts.kv_pool.act("swap_out")
            swap = self._require_swap("swap_out")
            return swap.swap_out(self._rows_of(seqs))
        finally:
            self._gate.leave_with_result()

    def swap_in(self, seqs: object) -> SwapPlan:
        """Bring sequences back from the CPU pool, all or none. Blocks that the pool still caches are shared. O(blocks).

        Carry out the plan before the next step.

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            OutOfBlocks: if the pool has too few free blocks.
            SequenceNotReady: if a sequence is not swapped out.
            UnknownSequence: if a sequence is not running.
            InvalidArgument: if there is no CPU pool.
            PolicyError: if the eviction policy raised; nothing has changed.
        """
        self._gate.enter("swap_in")
        try:
            self._parts.kv_pool.act("swap_in")
            swap = self._require_swap("swap_in")
            return swap.swap_in(self._rows_of(seqs))
        finally:
            self._gate.leave_with_result()

    def can_swap_out(self, seqs: object) -> bool:
        """Return whether `swap_out` would move all of `seqs` now. Changes nothing. O(blocks).

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            UnknownSequence: if a sequence is not running.
            InvalidArgument: if there is no CPU pool.
        """
        self._gate.enter("can_swap_out")
        try:
            swap = self._require_swap("can_swap_out")
            return swap.can_swap_out(self._rows_of(seqs))
        finally:
            self._gate.leave()

    def can_swap_in(self, seqs: object) -> bool:
        """Return whether `swap_in` would bring all of `seqs` back now. Changes nothing. O(blocks).

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            UnknownSequence: if a sequence is not running.
            InvalidArgument: if there is no CPU pool.
        """
        self._gate.enter("can_swap_in")
        try:
            swap = self._require_swap("can_swap_in")
            return swap.can_swap_in(self._rows_of(seqs))
        finally:
            self._gate.leave()

    def _require_swap(self, call: str) -> SwapCalls:
        if self._swap is None:
            raise InvalidArgument(f"{call} needs a CPU pool; num_cpu_blocks is 0: give CPUPoolConfig(num_blocks=...)")
        return self._swap

    def _rows_of(self, seqs: object) -> vec[i64]:
        return self._sequences.rows_of(read_handles(seqs))

    # The pool at run time.

    def resize(self, num_blocks: object = 0, *, num_bytes: object = None) -> Resize:
        """Grow or shrink the pool while sequences run. Blocks in use are never moved. O(num_blocks).

        Growing takes effect at once. Shrinking evicts idle blocks beyond the new end; blocks there that are still held
        are removed when they are freed (`pool.num_retiring_blocks`). The caller resizes the KV tensors: after growing,
        before the next step; after shrinking, when no block is retiring and a plan made after that has been carried out
        (`reserve([])` makes one), because it may still move blocks beyond the end.

        Args:
            num_blocks: blocks of the pool, the null block included; 2 to 2**27.
            num_bytes: size in bytes instead, for groups with token_bytes (`CacheConfig.blocks_in`).

        Returns:
            APPLIED, or DEFERRED while blocks beyond the new end are held.

        Raises:
            InvalidArgument: if the size is outside its limits.
            NotEnoughMemory: if the system has no memory for it.
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
        """Replace the eviction policy. All retentions end. O(num_blocks).

        Args:
            policy: the name of a policy, or a class or function that makes one from num_blocks.

        Raises:
            InvalidArgument: if the name is unknown, or it makes no `EvictionPolicy`.
            PolicyError: if making it raises.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._evict.order.install(resolve_policy(policy, self._parts.kv_pool))
        finally:
            self._gate.leave()

    def retain(
        self, token_ids: object, *, priority: object = 1, expires_at: object = None, extra_keys: object = ()
    ) -> int:
        """Ask that the cached blocks at the beginning of a prompt be evicted last. O(blocks * log retained).

        A request, not a pin: when nothing else is idle, retained blocks are evicted, the lowest priority first. Call it
        again to change the priority.

        Args:
            token_ids: the prompt, integers (n,).
            priority: retention priority, 0 to 2**20; higher stays longer, 0 ends the retention.
            expires_at: time of `advance_time` at which the retention ends; None for never.
            extra_keys: what else the keys and values depend on (`blockyard.keys`).

        Returns:
            How many blocks it applies to.

        Raises:
            OverBudget: if more than `retention_blocks` blocks would be retained; then none is.
            InvalidArgument: if an argument is outside its limits, or the config has no `retention_blocks`.
        """
        self._gate.enter("retain")
        try:
            prompt = self._prompt(token_ids, extra_keys)
            level = read_priority(priority)
            return self._evict.retain(prompt, level, read_expiry(expires_at))
        finally:
            self._gate.leave()

    def num_retained_of(self, token_ids: object, *, extra_keys: object = ()) -> int:
        """Return how many cached blocks at the beginning of a prompt are retained now. O(tokens + blocks).

        If there are fewer than `retain` returned, the others' retention has ended (`ended_retentions`).

        Args:
            token_ids: the prompt, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("num_retained_of")
        try:
            return self._evict.num_retained_of(self._prompt(token_ids, extra_keys))
        finally:
            self._gate.leave()

    def hint(self, target: object, *, over: object = False) -> HintOutcome:
        """Set whether a session is over. This only affects which idle blocks are evicted first. O(log sessions).

        Args:
            target: name of the session, or handle of a running sequence.
            over: True if the session does not continue: blocks that only this session has used are then evicted before
                all others. False withdraws the hint.

        Returns:
            ACCEPTED, REFUSED or UNKNOWN (`HintOutcome`).

        Raises:
            UnknownSequence: if `target` is a sequence that has ended.
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("hint")
        try:
            is_over = require_bool("over", over)
            if isinstance(target, str):
                return self._hints.hint_name(require_session("target", target), is_over)
            if isinstance(target, bool) or not isinstance(target, (int, np.integer)):
                raise InvalidArgument(
                    f"target is {shown(target)}; it must be the name of a session or the handle of a sequence"
                )
            return self._hints.hint_row(self._sequences.row_of(target), is_over)
        finally:
            self._gate.leave()

    @property
    def num_sessions(self) -> int:
        """Known sessions, at most `max_sessions`. O(1)."""
        return self._hints.num_sessions()

    def advance_time(self, now: object) -> None:
        """Set the time for expiries, residency and the history, in any unit. It never goes back.

        Args:
            now: the time, at least that of the last call.

        Raises:
            InvalidArgument: if it is before the last time, or not finite.
        """
        self._gate.enter("advance_time")
        try:
            self._evict.order.advance(require_number("now", now))
        finally:
            self._gate.leave()

    def reset_prefix_cache(self) -> None:
        """Uncache all blocks, because the weights change. Running sequences continue, but cache nothing more.

        O(num_blocks).
        """
        self._gate.enter("reset_prefix_cache")
        try:
            self._evict.reset_prefix_cache()
            self._gate.note_change()
        finally:
            self._gate.leave()

    # Sequences.

    def num_tokens(self, seqs: object) -> Any:
        """Return the known tokens of a sequence as an int, or of several as an int64 array (B,). O(B).

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            UnknownSequence: if a sequence is not running.
        """
        return self._number_of("num_tokens", self._sequences.num_tokens, seqs)

    def num_computed_tokens(self, seqs: object) -> Any:
        """Return the computed tokens of a sequence as an int, or of several as an int64 array (B,). O(B).

        Tokens of a hit count, also while another sequence is still computing them.

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            UnknownSequence: if a sequence is not running.
        """
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
        """Return a copy of the known tokens of a sequence, int32 (num_tokens,). O(tokens).

        Args:
            seq: handle of the sequence.

        Raises:
            UnknownSequence: if it is not running.
        """
        self._gate.enter("token_ids")
        try:
            return self._inspection.token_ids(self._sequences.row_of(seq))
        finally:
            self._gate.leave()

    def block_ids(self, seq: object, group: object = 0) -> npt.NDArray[np.int32]:
        """Return a copy of the blocks of a sequence in order, int32 (n,). O(blocks).

        Blocks that a sliding window has passed are 0.

        Args:
            seq: handle of the sequence.
            group: number of the layer group.

        Raises:
            UnknownSequence: if it is not running.
            InvalidArgument: if there is no such group.
        """
        self._gate.enter("block_ids")
        try:
            table = self._table(group)
            return view_i32(table.row_blocks(self._sequences.row_of(seq)))
        finally:
            self._gate.leave()

    def num_owned_blocks(self, seqs: object) -> npt.NDArray[np.int64]:
        """Return how many blocks only this sequence holds, int64 (B,): preempting it would free them. O(blocks).

        Args:
            seqs: a handle, or handles (B,).

        Raises:
            UnknownSequence: if a sequence is not running.
        """
        self._gate.enter("num_owned_blocks")
        try:
            return self._inspection.num_owned_blocks(self._rows_of(seqs))
        finally:
            self._gate.leave()

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Block table of the first layer group, int32 (max_num_seqs, blocks of max_model_len), padded with 0.

        A read-only view that stays up to date.
        """
        return whole_table(self._parts.store.tables[0])

    def group_table(self, group: object) -> npt.NDArray[np.int32]:
        """Return the block table of a layer group, int32 (max_num_seqs, blocks): a read-only view that stays current.

        Args:
            group: number of the layer group.

        Raises:
            InvalidArgument: if there is no such group.
        """
        return whole_table(self._table(group))

    def _table(self, group: object) -> BlockTable:
        tables = self._parts.store.tables
        return tables[require_int("group", group, 0, len(tables) - 1)]

    def is_swapped_out(self, seq: object) -> bool:
        """Return whether the blocks of a sequence are in the CPU pool. O(1).

        Args:
            seq: handle of the sequence.

        Raises:
            UnknownSequence: if it is not running.
        """
        return self._sequences.is_swapped[self._sequences.row_of(seq)] != 0

    @property
    def num_seqs(self) -> int:
        """Number of running sequences. O(1)."""
        return int(self._sequences.num_live_rows())

    def running(self) -> dict[int, str]:
        """Return the running sequences with their holders, a leak report at the end of work. O(max_num_seqs)."""
        self._gate.enter("running")
        try:
            return self._inspection.running()
        finally:
            self._gate.leave()

    # Blocks.

    @property
    def config(self) -> CacheConfig:
        """Config that the cache was made with."""
        return self._parts.config

    @property
    def pool(self) -> LeasePool:
        """Pool of the blocks that have keys and values."""
        return self._parts.pool

    @property
    def contents(self) -> CachedContents:
        """Contents that prompts can hit, readable in slices."""
        return self._contents

    @property
    def cpu_pool(self) -> LeasePool | None:
        """CPU pool, or None."""
        return self._parts.cpu_pool

    @property
    def states(self) -> CacheStates:
        """Calls on the states of a hybrid model: find checkpoints, or supply a state from outside."""
        return self._states

    @property
    def block_size(self) -> int:
        """Tokens that are hashed and compared together; without layer groups, tokens in a block."""
        return int(self._parts.block_size)

    @property
    def generation(self) -> int:
        """Number of resets so far. Blocks cached before a reset can never be hit. O(1)."""
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
        """Blocks that are retained now, held or idle; 0 without `retention_blocks`. O(1)."""
        return self._evict.order.num_retained

    @property
    def num_held_by_tenant(self) -> npt.NDArray[np.int64]:
        """Blocks that each tenant holds, int64 (tenants,), in the order of `stats().tenants`. O(tenants)."""
        return self._inspection.num_held_by_tenant()

    @property
    def ended_retentions(self) -> RetentionEnds:
        """Blocks whose retention has ended so far, by cause. O(1)."""
        return self._evict.order.ended_retentions()

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that are in use, 0 to 1. O(1)."""
        return self._parts.pool.usage

    def block(self, block_id: object) -> KVCacheBlock:
        """Return one block with the sequences that hold it. O(all held blocks).

        Args:
            block_id: id of the block, 0 to num_blocks - 1.

        Raises:
            InvalidArgument: if there is no such block.
        """
        number = require_int("block_id", block_id, 0, int(self._parts.kv_pool.capacity) - 1)
        self._gate.enter("block")
        try:
            return self._inspection.block(number)
        finally:
            self._gate.leave()

    def stats(self) -> CacheStats:
        """Return the counters since the start and the state now. It may run during another call. O(max_num_seqs)."""
        return self._inspection.stats()

    # What happened, and why.

    def miss_causes(self, seq: object) -> MissCauses:
        """Return why tokens of a sequence's prompt were not hit, counted by cause at `allocate`. O(1).

        If the producer of a hit is freed before it has computed the hit, the counts change at the sequence's first
        `commit`.

        Args:
            seq: handle of the sequence.

        Raises:
            UnknownSequence: if it is not running.
            InvalidArgument: if the config has no `ObserveConfig(track_misses=True)`.
        """
        return self._inspection.miss_causes(self._sequences.row_of(seq))

    def miss_totals(self) -> MissCauses:
        """Return the causes of misses of all prompts whose computation has begun. O(1).

        Raises:
            InvalidArgument: if the config has no `ObserveConfig(track_misses=True)`.
        """
        return self._inspection.miss_totals()

    def history(self) -> list[AllocationEvent]:
        """Return the latest `history_size` events of the pool, oldest first; empty if it is 0. O(history_size)."""
        self._gate.enter("history")
        try:
            return [] if self._parts.history is None else self._parts.history.events()
        finally:
            self._gate.leave()

    def residency(self) -> Residency:
        """Return how long sampled blocks lived, lay idle and waited for reuse. O(1).

        Raises:
            InvalidArgument: if the config has no `ObserveConfig(residency_sample=...)`.
        """
        return self._inspection.residency()

    def take_events(self) -> KVCacheEvents:
        """Return which contents were cached and uncached since the last call (vLLM's `take_events`). O(events).

        Call it after each step, or less often: contents that were cached and evicted in between are left out, and the
        log never has more than four entries per block.

        Raises:
            InvalidArgument: if the config has no `ObserveConfig(enable_kv_cache_events=True)`.
        """
        self._gate.enter("take_events")
        try:
            return self._inspection.take_events()
        finally:
            self._gate.leave_with_result()

    def leak_report(self) -> list[Holding]:
        """Return who holds which blocks now: sequences, swapped-out ones included, and leases. O(held blocks).

        At the end of work, these were not freed. Changes nothing.
        """
        self._gate.enter("leak_report")
        try:
            return self._inspection.leak_report()
        finally:
            self._gate.leave()

    def check(self) -> None:
        """Verify every invariant of the cache. O(num_blocks + block tables).

        Raises:
            InvariantError: if one does not hold.
        """
        self._gate.enter("check")
        try:
            self._inspection.check()
            if self._waiting is not None:
                self._waiting.requests.check_order()
        finally:
            self._gate.leave()

    def __init_subclass__(cls) -> None:
        """Refuse subclasses: the class is compiled."""
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
