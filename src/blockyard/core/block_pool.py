"""The pool: blocks handed out as leases, and found again by their tokens."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..answers import AllocationEvent, Resize
from ..arguments import require_bool, require_int, require_str, shown
from ..config import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_HISTORY
from ..errors import InvalidArgument, OutOfBlocks, not_enough_memory
from ..hash_seeds import hash_seed_or_drawn
from .arrays import view_i32, view_i64, zeros_i32
from .gate import Gate
from .index.prompt import Prompt, make_chunk
from .policies import make_policy
from .policies.caught import CaughtPolicy
from .pool.block import KVCacheBlock
from .pool.caching import cache_next, cache_prompt
from .pool.found import FoundBlocks, find_computed, found_blocks, require_found
from .pool.lease import BlockLease, LeaseBook, held_blocks
from .pool.lease_parts import grow, part_of
from .pool.ledger import BlockLedger
from .pool.observer import Clock
from .refusing import refuse_copy, refuse_pickle, refuse_subclass
from .watch.history import AllocationHistory


class BlockPool:
    """Blocks of `block_size` tokens: counted, handed out, found again by their tokens, evicted.

    Block 0 is the null block, a placeholder in block tables; the others have ids 1 to num_blocks - 1 that never
    change. A block is in the free queue exactly when its ref_cnt is 0 (I1). A cached block stays in the index
    while it waits there, until a hit revives it or an allocation evicts it, each in O(1) (I4).

    Use it alone, through leases, or as the pool of a `KVCacheManager`, whose sequences hold blocks by their table rows.
    One call runs at a time (`blockyard.core.gate`).

    num_blocks: the null block included; 2 to 2**27. block_size: tokens a block; 1 to 4096. hash_seed: of the index's
    hash function; None draws one that cannot be guessed. history_size: events that `history` remembers, 0 for none.
    Raises `InvalidArgument` for values outside their limits, `NotEnoughMemory`.

    >>> pool = BlockPool(num_blocks=10, block_size=4)
    >>> lease = pool.get_new_blocks(2)
    >>> list(lease), pool.num_free_blocks
    ([1, 2], 7)
    >>> pool.cache_full_blocks(lease, [1, 2, 3, 4, 5, 6, 7, 8])
    >>> pool.free_blocks(lease)
    >>> list(pool.get_cached_blocks([1, 2, 3, 4, 9, 9, 9, 9]))
    [1]
    """

    def __init__(
        self,
        num_blocks: object,
        block_size: object = 16,
        enable_prefix_caching: object = True,
        hash_seed: object = None,
        history_size: object = 0,
    ) -> None:
        blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
        size = require_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        caching = require_bool("enable_prefix_caching", enable_prefix_caching)
        seed = hash_seed_or_drawn(hash_seed)
        events = require_int("history_size", history_size, 0, MAX_HISTORY)
        try:
            self._ledger = BlockLedger(blocks, size, size, caching, seed)
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {blocks}; the system has no memory for its arrays", error)
        self._gate = Gate()
        self._book = LeaseBook(self._ledger)
        self._gate.deferred.append(self._book)
        self._manager = ""
        self._history: AllocationHistory | None = None
        if events > 0:
            self._history = AllocationHistory(events, self._ledger.queue, Clock())
            self._ledger.watch(self._history)

    # What is there. One number each: these may be asked at any time, also while a call runs.

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self._ledger.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._ledger.block_size

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether full blocks are indexed and hit."""
        return self._ledger.enable_prefix_caching

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block; while a pool shrinks, those that are still to go included."""
        return self._ledger.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included. O(1)."""
        return self._ledger.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that leases or sequences hold. O(1)."""
        return self._ledger.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the index, held or not. O(1)."""
        return self._ledger.num_cached_blocks

    @property
    def num_retiring_blocks(self) -> int:
        """Blocks still held that a shrunken pool will not give out again. O(1)."""
        return self._ledger.num_retiring_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that an allocation took, or a shrinking pool gave up, so far. O(1)."""
        return int(self._ledger.num_evicted_blocks)

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks that left the free queue so far, new or revived by a hit. O(1)."""
        return int(self._ledger.num_allocated_blocks)

    @property
    def num_freed_blocks(self) -> int:
        """Blocks that came back to it; the rest of the allocated ones is in use. O(1)."""
        return int(self._ledger.num_freed_blocks)

    @property
    def peak_used_blocks(self) -> int:
        """Most blocks held at once so far. O(1)."""
        return int(self._ledger.peak_used_blocks)

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1. O(1)."""
        return self._ledger.usage

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """How often each block is held, int32 (num_blocks,), read-only, live until the pool grows.

        Longer than num_blocks after the pool has shrunk: blocks may still be held there.
        """
        return view_i32(self._ledger.ref_cnt)

    def cached_mask(self) -> npt.NDArray[np.bool_]:
        """Which blocks are in the index, bool, as long as `ref_counts`, a copy."""
        cached: npt.NDArray[np.bool_] = view_i64(self._ledger.index.identity)[::2] != 0
        return cached

    @property
    def is_managed(self) -> bool:
        """Whether it is the pool of a `KVCacheManager`, whose sequences hold blocks besides leases."""
        return self._manager != ""

    def free_block_ids(self) -> npt.NDArray[np.int32]:
        """The free blocks in the order in which they will be allocated, int32 (num_free_blocks,), a copy."""
        self._gate.enter("free_block_ids")
        try:
            return np.array(self._ledger.queue.block_ids(), dtype=np.int32)
        finally:
            self._gate.leave()

    def leases(self) -> list[BlockLease]:
        """The leases not freed yet, oldest first: the leak report of a pool that is used alone."""
        return list(self._book.live.values())

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it. O(leases)."""
        number = require_int("block_id", block_id, 0, int(self._ledger.capacity) - 1)
        self._gate.enter("block")
        try:
            return self._book.describe(number)
        finally:
            self._gate.leave()

    # Leases.

    def get_new_blocks(self, num_blocks: object, holder: object = "") -> BlockLease:
        """Hold `num_blocks` blocks from the head of the free queue, evicting what they cached. O(num_blocks).

        holder: a name for errors and leak reports.
        Of a manager with a CPU tier: what this evicts is saved by the next plan, so carry one out (`reserve([])`)
        before you write into the blocks.
        Raises `OutOfBlocks` when fewer are free, `InvalidArgument` for a count below 0.
        """
        self._gate.enter("get_new_blocks")
        try:
            count = require_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            name = require_str("holder", holder)
            self._require_free(count)
            self._ledger.act("get_new_blocks", name)
            blocks = zeros_i32(count)
            lease = self._book.make(blocks, name)
            self._take_new(lease, blocks, 0, count)
            return lease
        finally:
            self._gate.leave_with_result()

    def _require_free(self, count: int) -> None:
        if count > self._ledger.queue.num_free:
            raise OutOfBlocks(
                f"num_blocks is {count}; only {self.num_free_blocks} of {self.num_usable_blocks} blocks are free",
                count,
                self.num_free_blocks,
            )

    def _take_new(self, lease: BlockLease, blocks: vec[i32], start: i64, count: i64) -> None:
        """Take blocks for a lease that was just made; it goes again if the eviction policy fails."""
        try:
            self._ledger.evict_ahead(count)
        except BaseException:
            self._book.take_back(lease)
            raise
        self._ledger.acquire(blocks, start, count)

    def extend(self, lease: object, num_blocks: object) -> npt.NDArray[np.int32]:
        """Add `num_blocks` new blocks to a live lease; returns their ids, int32 (num_blocks,). Amortised O(num_blocks).

        See `get_new_blocks`.
        """
        self._gate.enter("extend")
        try:
            count = require_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            held = self._book.require_live(lease)
            self._require_free(count)
            self._ledger.act("extend", held.holder)
            return view_i32(grow(self._ledger, held, count))
        finally:
            self._gate.leave_with_result()

    def touch(self, lease: object, holder: object = "", start: object = 0, stop: object = None) -> BlockLease:
        """Hold blocks of a live lease once more, for another holder: all, or those at `start` to `stop`. O(blocks).

        Raises as `free_blocks` does, and `InvalidArgument` for positions outside the lease.
        """
        self._gate.enter("touch")
        try:
            name = require_str("holder", holder)
            first = require_int("start", start, 0, MAX_BLOCKS)
            last = None if stop is None else require_int("stop", stop, first, MAX_BLOCKS)
            held = self._book.require_live(lease)
            end = len(held) if last is None else last
            if not first <= end <= len(held):
                raise InvalidArgument(f"start is {first}, stop {end}; the lease has {len(held)} blocks")
            self._ledger.act("touch", name)
            another = part_of(self._book, held, first, end, name)
            blocks = held_blocks(another, 0, another._count)
            self._ledger.share(blocks, 0, len(blocks))
            return another
        finally:
            self._gate.leave_with_result()

    def copy_on_write(self, lease: object, position: object) -> tuple[int, int] | None:
        """Make the block at `position` of a live lease its own, before it is written. O(blocks).

        A block that others hold too is replaced by a new one: returns (old, new), and its keys and values are the
        caller's to copy. None where the lease holds it alone; if it is cached, it leaves the index, because what it
        holds is about to change. With a CPU tier see `get_new_blocks`. Raises `OutOfBlocks` when no block is free for
        the copy, `InvalidArgument` for a position outside the lease, and as `free_blocks` does.
        """
        self._gate.enter("copy_on_write")
        try:
            place = require_int("position", position, -MAX_BLOCKS, MAX_BLOCKS)
            held = self._book.require_live(lease)
            if not 0 <= place < len(held):
                raise InvalidArgument(f"position is {place}; the lease has {len(held)} blocks")
            self._ledger.act("copy_on_write", held._holder)
            return self._book.make_own(held, place)
        finally:
            self._gate.leave_with_result()

    def free_blocks(self, lease: object) -> None:
        """Free a lease, last block first. O(blocks).

        Blocks that nothing holds any more go to the tail of the free queue if cached, to its front if not. A free that
        arrives in the middle of another call is carried out when that call ends.
        Raises `DoubleFree` for a lease already freed, `ForeignBlock` for one of another pool.
        """
        if not self._gate.enter_free("free_blocks"):
            self._book.close_later(self._book.require_live(lease))
            self._gate.wait()
            return
        try:
            self._book.close(self._book.require_live(lease))
        finally:
            self._gate.leave()

    # The prefix cache.

    def cache_full_blocks(
        self, lease: object, token_ids: object, num_cached_blocks: object = 0, extra_keys: object = ()
    ) -> None:
        """Index the blocks of `lease` as the prompt `token_ids`, whose keys and values they hold now. O(tokens).

        token_ids: the tokens from the start of the sequence; only full blocks are indexed.
        num_cached_blocks: leading blocks of the lease that are indexed already, by a hit or an earlier call.
        `cache_next_blocks` needs the new tokens alone.
        Raises `InvalidArgument` when the tokens fill more blocks than the lease has, when a leading block
        is not cached, or when another one is.
        """
        self._gate.enter("cache_full_blocks")
        try:
            prompt = self._make_prompt(token_ids, extra_keys)
            num_full = prompt.num_tokens // i64(self.block_size)
            first = i64(require_int("num_cached_blocks", num_cached_blocks, 0, int(num_full)))
            held = self._book.require_live(lease)
            if self.enable_prefix_caching:
                cache_prompt(self._ledger, held, prompt, first, num_full)
        finally:
            self._gate.leave()

    def cache_next_blocks(
        self, lease: object, token_ids: object, extra_keys: object = (), num_cached_blocks: object = None
    ) -> int:
        """Index the blocks right behind those that a lease has cached: `token_ids` are theirs. O(new tokens).

        token_ids: the tokens behind the lease's cached blocks; of what fills no whole block nothing is kept, so give it
            again. A contiguous int32 array of many whole blocks is read as it lies.
        extra_keys: LoRA and CacheSalt count for a prompt's first block alone, and the chain carries them on. A Span has
            its position in the prompt, and may reach out of these tokens on both sides; tokens below 0, placeholders of
            an engine's own, may stand under spans alone.
        num_cached_blocks: where the caller stands, for one that goes back: blocks that have these tokens already stay
            as they are, and those that hang on a content that is gone (`uncache`) are linked anew.
        Returns the lease's `num_cached_blocks` now. What comes before is the last cached block itself, not what a hash
        says of it. Raises `StaleBlocks` when blocks that the lease had cached have lost their content,
        `InvalidArgument` when the tokens fill more blocks than the lease has, for a block that caches other
        tokens, or that others hold too (unless it had these very tokens before), and as `free_blocks` does.
        """
        self._gate.enter("cache_next_blocks")
        try:
            self._require_tokens()
            chunk = make_chunk(token_ids, extra_keys, self.block_size)
            asked = -1
            if num_cached_blocks is not None:
                asked = require_int("num_cached_blocks", num_cached_blocks, 0, MAX_BLOCKS)
            held = self._book.require_live(lease)
            if self.enable_prefix_caching:
                cache_next(self._ledger, held, chunk, asked)
            return held.num_cached_blocks
        finally:
            self._gate.leave()

    def find_cached_blocks(self, token_ids: object, extra_keys: object = ()) -> FoundBlocks:
        """The longest run of cached blocks that `token_ids` begins with, not held. O(blocks found).

        A question: the order of eviction and the policy know nothing of it. `hold` takes what it returns, as long as
        it is still there. A Span may end behind the tokens.
        """
        self._gate.enter("find_cached_blocks")
        try:
            return found_blocks(self._ledger, self._make_prompt(token_ids, extra_keys))
        finally:
            self._gate.leave_with_result()

    def hold(self, found: object, holder: object = "", num_blocks: object = None, extend_by: object = 0) -> BlockLease:
        """Hold the first `num_blocks` blocks of what was found, None for all, and `extend_by` new ones. O(blocks).

        The new blocks never evict those that are held. The tokens are not read again: a content has a number that no
        other gets. Raises `StaleBlocks` when a block holds another content by now, `ForeignBlock` for what another pool
        found, `OutOfBlocks` when fewer than `extend_by` blocks are free besides those that are held, `InvalidArgument`,
        and `PolicyError`.
        """
        self._gate.enter("hold")
        try:
            if not isinstance(found, FoundBlocks):
                raise InvalidArgument(f"found is {shown(found)}; it must be what find_cached_blocks returns")
            name = require_str("holder", holder)
            count = len(found)
            if num_blocks is not None:
                count = require_int("num_blocks", num_blocks, 0, count)
            more = require_int("extend_by", extend_by, 0, MAX_BLOCKS)
            require_found(self._ledger, found, count)
            idle = int(self._ledger.count_idle(found._blocks, count))
            if more > self.num_free_blocks - idle:
                raise OutOfBlocks(
                    f"extend_by is {more}; besides {idle} that are hit, only {self.num_free_blocks - idle} of "
                    f"{self.num_usable_blocks} blocks are free",
                    more + idle,
                    self.num_free_blocks,
                )
            return self._hold_hit(found._blocks[:count], "hold", name, 0, more)
        finally:
            self._gate.leave_with_result()

    def get_cached_blocks(self, token_ids: object, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold the longest run of cached blocks that `token_ids` begins with; maybe none. O(blocks found).

        The lease is counted before it is returned, so nothing can evict it in between (I8).
        """
        self._gate.enter("get_cached_blocks")
        try:
            name = require_str("holder", holder)
            found = find_computed(self._ledger, self._make_prompt(token_ids, extra_keys))
            return self._hold_hit(self._ledger.index.found[:found], "get_cached_blocks", name)
        finally:
            self._gate.leave_with_result()

    def get_cached_block(self, token_ids: object, extra_keys: object = (), holder: object = "") -> BlockLease | None:
        """Hold the one block that caches the last full block of `token_ids`, after all before it; else None."""
        self._gate.enter("get_cached_block")
        try:
            name = require_str("holder", holder)
            prompt = self._make_prompt(token_ids, extra_keys)
            found = find_computed(self._ledger, prompt)
            if found == 0 or found < prompt.num_tokens // self.block_size:
                return None
            return self._hold_hit(self._ledger.index.found[found - 1 : found], "get_cached_block", name, found - 1)
        finally:
            self._gate.leave_with_result()

    def _hold_hit(self, blocks: vec[i32], call: str, holder: str, first_block: i64 = 0, more: i64 = 0) -> BlockLease:
        """A lease on cached blocks and `more` new ones. A policy that fails, or is interrupted when it is told, leaves
        all as it was."""
        ledger = self._ledger
        count = i64(len(blocks))
        ledger.act(call, holder)
        lease = self._book.make(blocks, holder)
        lease._num_cached = count
        lease._first_block = first_block
        peak = ledger.peak_used_blocks
        ledger.note_hits(blocks, 0, count)
        ledger.share(blocks, 0, count)
        if self._gate.interruption.error is not None:
            self._let_go(lease, peak)
            self._gate.interruption.raise_now()
        if more > 0:
            try:
                grow(ledger, lease, more)
            except BaseException:
                self._let_go(lease, peak)
                raise
        return lease

    def _let_go(self, lease: BlockLease, peak: i64) -> None:
        """Undo a hold that has just been made."""
        self._ledger.unshare(lease._blocks, 0, lease._count)
        self._ledger.peak_used_blocks = peak
        self._book.take_back(lease)

    def num_cached_tokens(self, token_ids: object, extra_keys: object = ()) -> int:
        """How many leading tokens of `token_ids` stand in cached, computed blocks. Holds nothing. O(blocks)."""
        self._gate.enter("num_cached_tokens")
        try:
            return int(find_computed(self._ledger, self._make_prompt(token_ids, extra_keys))) * self.block_size
        finally:
            self._gate.leave()

    def cached_block_ids(self, token_ids: object, extra_keys: object = ()) -> list[int]:
        """All blocks that cache the last full block of `token_ids`, oldest first: equal content, several blocks.

        Holds nothing. O(blocks found + duplicates).
        """
        self._gate.enter("cached_block_ids")
        try:
            prompt = self._make_prompt(token_ids, extra_keys)
            found = find_computed(self._ledger, prompt)
            if found == 0 or found < prompt.num_tokens // self.block_size:
                return []
            return self._ledger.index.rings.members(i64(self._ledger.index.found[found - 1]))
        finally:
            self._gate.leave()

    def _make_prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        self._require_tokens()
        return make_chunk(token_ids, extra_keys, self.block_size).at(0, self.block_size)

    def _require_tokens(self) -> None:
        if not self._ledger.knows_tokens:
            raise InvalidArgument("this pool belongs to a manager with layer groups or a CPU pool; ask the manager")

    # What happened.

    def history(self) -> list[AllocationEvent]:
        """The latest `history_size` events, oldest first. O(history_size). Empty when it is off."""
        self._gate.enter("history")
        try:
            return [] if self._history is None else self._history.events()
        finally:
            self._gate.leave()

    # The size, reset and checks.

    def resize(self, num_blocks: object) -> Resize:
        """Grow or shrink to `num_blocks` blocks, the null block included. O(num_blocks); never moves a held block.

        Growing is done at once. Shrinking evicts the idle blocks beyond the end, and answers DEFERRED while some are
        held there: each goes when it is freed (`num_retiring_blocks`). Raises `InvalidArgument`, `NotEnoughMemory`.
        """
        self._gate.enter("resize")
        try:
            target = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
            self._require_alone("resize")
            return self._ledger.resize(target, self._ledger.make_room(target))
        finally:
            self._gate.leave()

    def set_eviction_policy(self, policy: object) -> None:
        """Let another policy choose what is evicted: a name, or a class or callable that makes one from num_blocks.

        O(num_blocks). Raises `InvalidArgument`; `PolicyError` where making it raises.
        """
        self._gate.enter("set_eviction_policy")
        try:
            self._require_alone("set_eviction_policy")
            num_blocks = int(self._ledger.capacity)
            made = make_policy(policy, num_blocks)
            if isinstance(policy, str) and policy == "lru":
                self._ledger.choose_by(None, None)
            else:
                caught = CaughtPolicy(made, num_blocks, self._gate.interruption)
                self._ledger.choose_by(caught, caught)
        finally:
            self._gate.leave()

    def reset(self) -> None:
        """Forget all cached content at once; blocks stay with their holders. O(num_blocks)."""
        self._gate.enter("reset")
        try:
            self._require_alone("reset_prefix_cache")
            self._ledger.reset()
        finally:
            self._gate.leave()

    def _require_alone(self, call: str) -> None:
        if self._manager:
            raise InvalidArgument(f"this pool belongs to a KVCacheManager; ask the manager for {call}")

    def check(self) -> None:
        """Verify what the pool alone can know: I1, I4 and the counts. O(num_blocks). Raises `InvariantError`."""
        self._gate.enter("check")
        try:
            self._ledger.check()
        finally:
            self._gate.leave()

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
        if getattr(cls, "__module__", "") != __name__:
            raise refuse_subclass("BlockPool")

    def __copy__(self) -> "BlockPool":
        raise refuse_copy("a BlockPool", "make another one")

    def __deepcopy__(self, memo: object) -> "BlockPool":
        raise refuse_copy("a BlockPool", "make another one")

    def __reduce__(self) -> str:
        raise refuse_pickle("a BlockPool", "make one in the other process")


class ManagedPool(BlockPool):
    """The pool of a manager: the manager's calls and these enter by one gate."""

    def __init__(self, book: LeaseBook, gate: Gate, history: AllocationHistory | None) -> None:
        self._ledger = book.ledger
        self._gate = gate
        self._book = book
        self._history = history
        self._manager = "KVCacheManager"
        gate.deferred.append(book)
