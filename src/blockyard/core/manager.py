"""The manager: the two-phase life of sequences over one pool of blocks."""

from typing import Final

from mypy_extensions import i64

from ..answers import Admission, Resize
from ..arguments import require_bool, require_int, require_number, require_str, shown
from ..config import MAX_BLOCKS
from ..errors import InvalidArgument
from .hit import Hit
from .plan import StepPlan, SwapPlan
from .prompt import Prompt, make_prompt
from .refusing import refuse_copy, refuse_pickle, refuse_subclass
from .sequences import read_handles
from .swapping import require_cpu
from .view import CacheView

MAX_PRIORITY: Final = 2**20


class KVCacheManager(CacheView):
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
    >>> cache.commit([first], 6, [7])
    >>> second = cache.allocate([1, 2, 3, 4, 9])
    >>> cache.num_computed_tokens(second)
    4
    >>> cache.free([first, second])
    >>> cache.num_used_blocks
    0
    """

    # Admission.

    def can_allocate(self, token_ids: object, extra_keys: object = (), num_seqs: object = 1) -> Admission:
        """Whether `allocate` would take this prompt: OK, LATER or NEVER. O(tokens). Changes nothing.

        The watermark counts as used, so that running sequences can grow without evicting one another.
        """
        self._gate.enter("can_allocate")
        try:
            count = require_int("num_seqs", num_seqs, 1, int(self._sequences.max_num_seqs))
            prompts = [make_prompt(token_ids, extra_keys, int(self._block_size))]
            return self._admitting.answer(prompts, self._admitting.look_up_all(prompts), count)
        finally:
            self._gate.leave()

    def allocate(
        self,
        token_ids: object,
        holder: object = "",
        extra_keys: object = (),
        num_seqs: object = 1,
        resumed: object = False,
    ) -> int:
        """Admit a prompt: hold the blocks of its longest cached prefix, and new ones for the rest. O(tokens).

        token_ids: integers (n,), as a list, an int32 or int64 array, a torch tensor, or anything with a buffer.
        holder: a name for errors and leak reports. extra_keys: see `blockyard.keys`.
        num_seqs: sequences that will come of this prompt (parallel sampling): their rows are set aside, so that
        `fork(seq, num_seqs - 1)` finds them, and admission counts the blocks they copy first.
        resumed: the request ran before and was preempted: its tokens are counted apart, as neither prompt nor hit.
        Returns the sequence's handle. `num_computed_tokens` then tells the hit: whole blocks, never the last token.
        Raises `NeverFits`, `OutOfBlocks` (or see `try_allocate`), `OutOfRows` or `InvalidArgument`.
        """
        self._gate.enter("allocate")
        try:
            prompt = make_prompt(token_ids, extra_keys, int(self._block_size))
            name = require_str("holder", holder)
            count = require_int("num_seqs", num_seqs, 1, int(self._sequences.max_num_seqs))
            again = require_bool("resumed", resumed)
            hits = [self._admitting.look_up(prompt)]
            self._admitting.require([prompt], hits, count)
            return self._admit([prompt], hits, [name], count, again)[0]
        finally:
            self._gate.leave_with_result()

    def try_allocate(
        self,
        token_ids: object,
        holder: object = "",
        extra_keys: object = (),
        num_seqs: object = 1,
        resumed: object = False,
    ) -> int | Admission:
        """`allocate` where it fits, else LATER or NEVER: what a scheduler's loop wants, in one lookup. O(tokens).

        Returns the sequence's handle, or the `Admission` that `can_allocate` would answer; nothing has changed then.
        Raises `InvalidArgument`, and `PolicyError` as `allocate` does.
        """
        self._gate.enter("try_allocate")
        try:
            prompt = make_prompt(token_ids, extra_keys, int(self._block_size))
            name = require_str("holder", holder)
            count = require_int("num_seqs", num_seqs, 1, int(self._sequences.max_num_seqs))
            again = require_bool("resumed", resumed)
            hits = [self._admitting.look_up(prompt)]
            answer = self._admitting.answer([prompt], hits, count)
            if answer is not Admission.OK:
                return answer
            self._sequences.require_rows(count)
            return self._admit([prompt], hits, [name], count, again)[0]
        finally:
            self._gate.leave_with_result()

    def can_allocate_batch(self, prompts: object, extra_keys: object = ()) -> Admission:
        """Whether `allocate_batch` would take these prompts together: OK, LATER or NEVER. O(tokens)."""
        self._gate.enter("can_allocate_batch")
        try:
            made = self._make_prompts(prompts, extra_keys)
            return self._admitting.answer(made, self._admitting.look_up_all(made), 1)
        finally:
            self._gate.leave()

    def allocate_batch(self, prompts: object, holders: object = (), extra_keys: object = ()) -> list[int]:
        """Admit several prompts, all or none. O(tokens).

        prompts: a list of what `allocate` takes. holders: as many names, or none. extra_keys: for all of them.
        What they begin with in common is taken once. Returns their handles. Raises as `allocate` does.
        """
        self._gate.enter("allocate_batch")
        try:
            made = self._make_prompts(prompts, extra_keys)
            names = [require_str(f"holders[{i}]", name) for i, name in enumerate(_list_of_holders(holders, len(made)))]
            hits = self._admitting.look_up_all(made)
            self._admitting.require(made, hits, 1)
            return self._admit(made, hits, names, 1, False)
        finally:
            self._gate.leave_with_result()

    def _make_prompts(self, prompts: object, extra_keys: object) -> list[Prompt]:
        if not isinstance(prompts, (list, tuple)) or not prompts:
            raise InvalidArgument(f"prompts is {type(prompts).__name__}; a list of at least 1 prompt is needed")
        return [make_prompt(tokens, extra_keys, int(self._block_size)) for tokens in prompts]

    def _admit(
        self, prompts: list[Prompt], hits: list[Hit], holders: list[str], num_seqs: int, resumed: bool
    ) -> list[int]:
        """Take in prompts that fit. Each of a batch is looked up again: those before it may be what it begins with."""
        for prompt in prompts:
            self._admitting.prepare(prompt)
        handles = [0] * len(prompts)
        version = self._sequences.version
        peak = self._ledger.peak_used_blocks
        rows: list[int] = []
        try:
            self._admitting.secure_batch(prompts, hits)
            alone = len(prompts) == 1
            for index, prompt in enumerate(prompts):
                self._note("allocate", holders[index])
                hit = hits[0] if alone else self._admitting.look_up(prompt)
                rows.append(int(self._admitting.admit(prompt, hit, holders[index], num_seqs, resumed, alone)))
        except BaseException:
            for row in reversed(rows):
                self._ending.end(row)
            self._sequences.version = version
            self._ledger.peak_used_blocks = peak
            raise
        for index, prompt in enumerate(prompts):
            self._admitting.record(rows[index], prompt, resumed)
            handles[index] = int(self._sequences.handle[i64(rows[index])])
        return handles

    # The step.

    def reserve(self, seqs: object, num_new_tokens: object) -> StepPlan:
        """Slots for the next `num_new_tokens` tokens of each sequence, the whole batch at once. O(batch + new tokens).

        seqs: handles (B,); num_new_tokens: integers (B,), or one for all. It may go past the known tokens
        (speculation); `commit` then names them. A new reservation of a sequence replaces an open one.
        Sequences are served in order; put the owner of joined blocks before its joiners (`blockyard.core.joining`).
        One that cannot be served is told apart in `plan.status`: it gets nothing and keeps what it has, and an open
        reservation of it ends.
        Raises `UnknownSequence` or `InvalidArgument`.
        """
        self._gate.enter("reserve")
        try:
            self._note("reserve", "")
            return self._reserving.reserve(seqs, num_new_tokens)
        finally:
            self._gate.leave_with_result()

    def commit(self, seqs: object, num_computed: object, next_tokens: object = None) -> None:
        """Say what the step did: the first `num_computed` reserved tokens of each sequence are computed. O(batch).

        num_computed: integers (B,), or one for all, at most what was reserved; 0 says that the step failed.
        next_tokens: tokens to append, integers (B,) or (B, k) with -1 for none. All known tokens but the last
        must have a block; with num_computed=0 this only appends, as after a fork.
        Full computed blocks become shareable. The reservation ends.
        Raises `UnknownSequence`, `SequenceNotReady` or `InvalidArgument`.
        """
        self._gate.enter("commit")
        try:
            self._note("commit", "")
            self._committing.commit(seqs, num_computed, next_tokens)
        finally:
            self._gate.leave()

    def can_append(self, seqs: object, num_new_tokens: object = 1) -> bool:
        """Whether `reserve` would serve all of `seqs` now. O(batch). Changes nothing.

        Cautious by a block where several forks that share their last block are asked about together, and where one
        waits for blocks that another would compute in the same step.
        """
        self._gate.enter("can_append")
        try:
            return self._reserving.can_reserve(seqs, num_new_tokens)
        finally:
            self._gate.leave()

    def append(self, seqs: object, next_tokens: object) -> None:
        """Append tokens to sequences without computing anything: `commit(seqs, 0, next_tokens)`. O(batch)."""
        self._gate.enter("append")
        try:
            self._note("append", "")
            self._committing.commit(seqs, 0, next_tokens)
        finally:
            self._gate.leave()

    # Forks and cuts.

    def fork(self, seq: object, num_forks: object = 1) -> list[int]:
        """New sequences that share all blocks of `seq`; whoever writes first gets a copy (CoW). O(blocks * forks).

        Returns their handles. Raises `SequenceNotReady` unless all tokens of `seq` are computed, but perhaps the last,
        and nothing is reserved; `OutOfRows`; `InvalidArgument` for a count below 1.
        """
        self._gate.enter("fork")
        try:
            self._note("fork", "")
            return self._branching.fork(seq, num_forks)
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
            self._note("regroup", "")
            return self._branching.regroup(seqs, parents)
        finally:
            self._gate.leave_with_result()

    def truncate(self, seq: object, num_tokens: object) -> None:
        """Forget all but the first `num_tokens` tokens, and give back the blocks behind them. O(blocks freed).

        Raises `SequenceNotReady` while something is reserved or the prompt is not computed, and `InvalidArgument`
        unless 1 <= num_tokens <= the sequence's tokens, or when blocks that lie in the sliding window before the cut
        were given back already.
        """
        self._gate.enter("truncate")
        try:
            self._note("truncate", "")
            self._branching.truncate(seq, num_tokens)
        finally:
            self._gate.leave()

    def free(self, seqs: object) -> None:
        """End sequences, one handle or many, and give their blocks back, last block first. O(blocks).

        Cached blocks stay hittable until they are evicted. A free that arrives in the middle of another call is carried
        out when that call ends. Raises `UnknownSequence` for a handle that was freed already, is another manager's or
        was never given; then none is freed.
        """
        given = read_handles(seqs)
        if not self._gate.enter_free("free"):
            self._ending.free_later(given)
            self._gate.wait()
            return
        try:
            self._ending.free(given)
        finally:
            self._gate.leave()

    def reset_prefix_cache(self) -> None:
        """No cached block hits any more, from now on; sequences may run, and go on without publishing. O(num_blocks).

        For new weights: keys and values of the old ones must not serve new requests.
        """
        self._gate.enter("reset_prefix_cache")
        try:
            self._sequences.version += 1
            self._pages.reset()
            if self._mapping is not None:
                self._mapping.reset()
        finally:
            self._gate.leave()

    # Memory below the GPU.

    def swap_out(self, seqs: object) -> SwapPlan:
        """Move sequences to the CPU pool, all or none: their blocks are free, their handles stay. O(blocks).

        Carry out the plan before the next step. Blocks that only hold tokens yet to be computed are given up. A
        sequence keeps its row; until `swap_in` it cannot be reserved for, but forked, cut, appended to and freed.
        Evicted blocks whose saving no plan has told of yet keep their CPU blocks until one does.
        Raises `OutOfBlocks` when the CPU pool has too few free blocks, `SequenceNotReady` while tokens are reserved
        or when one is swapped out already, `InvalidArgument` without a CPU pool.
        """
        self._gate.enter("swap_out")
        try:
            self._note("swap_out", "")
            return require_cpu(self._swapping, "swap_out").swap_out(seqs)
        finally:
            self._gate.leave_with_result()

    def swap_in(self, seqs: object) -> SwapPlan:
        """Bring sequences back, all or none. What the pool still caches of them is shared, not moved. O(blocks).

        Carry out the plan before the next step. Raises `OutOfBlocks`, `SequenceNotReady` for one that is not swapped
        out, `InvalidArgument` without a CPU pool.
        """
        self._gate.enter("swap_in")
        try:
            self._note("swap_in", "")
            return require_cpu(self._swapping, "swap_in").swap_in(seqs)
        finally:
            self._gate.leave_with_result()

    # Life at run time.

    def resize(self, num_blocks: object) -> Resize:
        """Grow the pool, or shrink it, while sequences run. O(num_blocks). Never moves a block that is in use.

        Growing is done at once. Shrinking evicts what is idle beyond the new end; DEFERRED says that blocks there are
        still held (`pool.num_retiring_blocks`) and go when they are given back. The KV tensors are the caller's to
        resize: after growing before the next step; after shrinking once nothing retires any more and the plan made
        after that (`reserve`, of nothing if need be) is carried out, because it may still move blocks beyond the end.
        Raises `InvalidArgument` for a size outside 2 to 2**27, `NotEnoughMemory` where the system has none.
        """
        self._gate.enter("resize")
        try:
            size = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
            room = self._ledger.make_room(size)
            pages = self._mapping.make_room(size) if self._mapping is not None else None
            watermark = i64(int(self._config.watermark * size))
            self._note("resize", "")
            self._sequences.version += 1
            if self._mapping is not None:
                self._mapping.move_into(pages)
            answer = self._ledger.resize(size, room)
            self._admitting.watermark = watermark
            return answer
        finally:
            self._gate.leave()

    def set_eviction_policy(self, policy: object) -> None:
        """Let another policy choose what is evicted: a name, or a class or callable that makes one from num_blocks.

        What retention holds back it holds back no longer. O(num_blocks). Raises `InvalidArgument`.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._install_policy(policy)
        finally:
            self._gate.leave()

    def retain(
        self, token_ids: object, priority: object = 1, expires_at: object = None, extra_keys: object = ()
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
            prompt = make_prompt(token_ids, extra_keys, int(self._block_size))
            level = require_int("priority", priority, 0, MAX_PRIORITY)
            until = None if expires_at is None else require_number("expires_at", expires_at)
            return self._retain(self._cached_blocks(prompt), level, until)
        finally:
            self._gate.leave()

    def advance_time(self, now: object) -> None:
        """Tell the cache what time it is, in any unit: for expiries, residency and the history. It never goes back.

        Raises `InvalidArgument` for a time before the last one.
        """
        self._gate.enter("advance_time")
        try:
            time = require_number("now", now)
            if time < self._clock.now:
                raise InvalidArgument(f"now is {time}; it must be at least {self._clock.now}, the time told before")
            self._clock.now = time
            if self._retention is not None:
                self._retention.advance(time)
        finally:
            self._gate.leave()

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        raise refuse_subclass("KVCacheManager")

    def __copy__(self) -> "KVCacheManager":
        raise refuse_copy("a KVCacheManager", "make another one from its config")

    def __deepcopy__(self, memo: object) -> "KVCacheManager":
        raise refuse_copy("a KVCacheManager", "make another one from its config")

    def __reduce__(self) -> str:
        raise refuse_pickle("a KVCacheManager", "make one from its config in the other process")


def _list_of_holders(holders: object, num_prompts: int) -> list[object]:
    """A name for each prompt; none at all stands for empty ones."""
    names: list[object] = list(holders) if isinstance(holders, (list, tuple)) else [holders]
    if isinstance(holders, (list, tuple)) and len(names) in (0, num_prompts):
        return names or [""] * num_prompts
    raise InvalidArgument(f"holders is {shown(holders)}; {num_prompts} names are needed, one for each prompt")
