"""The pool: blocks handed out as leases, and found again by their tokens."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..answers import Resize
from ..arguments import require_bool, require_int, require_str, shown
from ..config import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_HISTORY
from ..errors import InvalidArgument, OutOfBlocks, not_enough_memory
from ..hash_seeds import hash_seed_or_drawn
from .arrays import view_i32, zeros_i32
from .gate import Gate
from .index.prompt import Prompt, has_tokens, make_chunk
from .pool.block import KVCacheBlock
from .pool.by_id import evict_idle, require_free, require_ids, uncache
from .pool.caching import cache_next, cache_prompt
from .pool.eviction import EvictionOrder
from .pool.found import FoundBlocks, find_computed, found_blocks, require_found
from .pool.lease import BlockLease, LeaseBook, check_leases, held_blocks, require_countable
from .pool.lease_parts import adopt, cut_off, give_back, grow, part_of
from .pool.ledger import BlockLedger
from .pool.misses import note_missed_keys, note_misses
from .pool_records import PoolRecords
from .refusing import refuse_copy, refuse_pickle, refuse_subclass
from .store.event_reader import EventReader
from .tokens import int64_items
from .watch.history import AllocationHistory
from .watch.residency import ResidencySampler


class BlockPool(PoolRecords):
    """Blocks of `block_size` tokens: counted, handed out, found again by their tokens, evicted.

    Block 0 is the null block, a placeholder in block tables; the others have ids 1 to num_blocks - 1 that never
    change. A block is in the free queue exactly when its ref_cnt is 0 (I1). A cached block stays in the index
    while it waits there, until a hit revives it or an allocation evicts it, each in O(1) (I4).

    Use it alone, through leases, or as the pool of a `KVCacheManager`, whose sequences hold blocks by their table rows.
    One call runs at a time (`blockyard.core.gate`).

    num_blocks: the null block included; 1 to 2**27 (a pool of the null block alone gives out nothing). block_size:
    tokens a block; 1 to 4096. hash_seed: of the index's hash function; None draws one that cannot be guessed.
    history_size, eviction_policy, retention_blocks, residency_sample, enable_kv_cache_events: as in `CacheConfig`.
    Raises `InvalidArgument` for values outside their limits, `NotEnoughMemory`, and `PolicyError` where making the
    policy raises.

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
        eviction_policy: object = "lru",
        retention_blocks: object = 0,
        residency_sample: object = 0,
        enable_kv_cache_events: object = False,
    ) -> None:
        blocks = require_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        size = require_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        caching = require_bool("enable_prefix_caching", enable_prefix_caching)
        seed = hash_seed_or_drawn(hash_seed)
        events = require_int("history_size", history_size, 0, MAX_HISTORY)
        retained = require_int("retention_blocks", retention_blocks, 0, MAX_BLOCKS)
        sample = require_int("residency_sample", residency_sample, 0, MAX_BLOCKS)
        is_told = require_bool("enable_kv_cache_events", enable_kv_cache_events)
        try:
            ledger = BlockLedger(blocks, size, size, caching, seed)
            PoolRecords.__init__(self, ledger, Gate(), "", None)
            self._observe(events, sample, is_told)
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {blocks}; the system has no memory for its arrays", error)
        self._book = LeaseBook(self._ledger)
        self._gate.deferred.append(self._book)
        self._order = EvictionOrder(self._ledger, self._gate.interruption, self._clock, retained)
        self._order.install(eviction_policy)

    def _observe(self, history_size: int, residency_sample: int, enable_kv_cache_events: bool) -> None:
        if history_size > 0:
            self._history = AllocationHistory(history_size, self._ledger.queue, self._clock)
            self._ledger.watch(self._history)
        if residency_sample > 0:
            self._residency = ResidencySampler(residency_sample, self._clock, self.num_blocks)
            self._ledger.watch(self._residency)
        if enable_kv_cache_events:
            self._events = EventReader(self._ledger, [])

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
            end = self._require_part(held, first, last)
            require_countable(self._ledger, held._blocks, first, end)
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

    def release(self, lease: object, start: object, stop: object = None) -> int:
        """Release the blocks of a live lease at `start` to `stop`, None for its end. O(blocks released).

        The null block (0) takes their places, so the others keep theirs in a block table: for what has fallen behind a
        sliding window. Places released before are left. What is cached next still comes behind what was cached last.
        To release the end of a lease, such as rejected drafts, free what `split` cuts off.
        Returns how many blocks were released. Raises as `free_blocks` does, and `InvalidArgument` for positions
        outside the lease.
        """
        self._gate.enter("release")
        try:
            first = require_int("start", start, 0, MAX_BLOCKS)
            last = None if stop is None else require_int("stop", stop, first, MAX_BLOCKS)
            held = self._book.require_live(lease)
            end = self._require_part(held, first, last)
            self._ledger.act("release", held._holder)
            return give_back(self._ledger, held, first, end)
        finally:
            self._gate.leave()

    def _require_part(self, lease: BlockLease, first: int, last: int | None) -> int:
        end = len(lease) if last is None else last
        if not first <= end <= len(lease):
            raise InvalidArgument(f"start is {first}, stop {end}; the lease has {len(lease)} blocks")
        return end

    def split(self, lease: object, at: object, holder: object = "") -> BlockLease:
        """Cut a live lease in two: it keeps its first `at` blocks, the lease that is returned has the others. O(those).

        No block is taken or freed. `free_blocks(split(lease, n))` shortens a lease to n blocks, and `extend` goes on
        behind them. Raises as `free_blocks` does, and `InvalidArgument` for a position outside the lease.
        """
        self._gate.enter("split")
        try:
            name = require_str("holder", holder)
            position = require_int("at", at, 0, MAX_BLOCKS)
            held = self._book.require_live(lease)
            if position > len(held):
                raise InvalidArgument(f"at is {position}; the lease has {len(held)} blocks")
            return cut_off(self._book, held, position, name)
        finally:
            self._gate.leave_with_result()

    def free_blocks(self, lease: object, last: object = False) -> None:
        """Free a lease, last block first. O(blocks).

        Blocks that nothing holds any more go to the tail of the free queue if cached, to its front if not: these are
        the next to be taken, in the order in which they stood. last: the tail takes those that are not cached too, so
        that all of them are taken again as late as the cached ones, whatever the policy.
        A free that arrives in the middle of another call is carried out when that call ends.
        Raises `DoubleFree` for a lease already freed, `ForeignBlock` for one of another pool.
        """
        goes_last = last is not False and require_bool("last", last)
        if not self._gate.enter_free("free_blocks"):
            self._book.close_later(self._book.require_live(lease), goes_last)
            self._gate.wait()
            return
        try:
            held = self._book.require_live(lease)
            if goes_last:
                self._book.close_to_the_end(held)
            else:
                self._book.close(held)
        finally:
            self._gate.leave()

    # Blocks by their ids.

    def uncache(self, block_ids: object) -> int:
        """Let blocks lose their content, whether a lease holds them or not, as after a failed load. O(blocks).

        Nothing hits them any more, nor what was cached behind them, until `cache_next_blocks` has cached them again.
        Idle ones are the next to be taken. block_ids: integers from 1; those that cache nothing are skipped.
        Returns how many lost their content. Raises `InvalidArgument`.
        """
        self._gate.enter("uncache")
        try:
            blocks = int64_items("block_ids", block_ids)
            self._require_alone("uncache")
            require_ids(blocks, int(self._ledger.capacity))
            return uncache(self._ledger, blocks)
        finally:
            self._gate.leave()

    def adopt(self, block_ids: object, holder: object = "", may_evict: object = True) -> BlockLease:
        """A lease on free blocks that the caller names, for pools whose free blocks the engine hands out. O(blocks).

        Such a pool gives out no blocks itself: it caches those that it is given, and tells which ones to use again
        (`evict`).
        block_ids: different integers from 1 to num_blocks - 1. may_evict: whether what they cached is evicted, or
            refused. Raises `InvalidArgument` for other ids, for a block that is held, and for one that is cached if
            `may_evict` is False.
        """
        self._gate.enter("adopt")
        try:
            blocks = int64_items("block_ids", block_ids)
            name = require_str("holder", holder)
            evicts = require_bool("may_evict", may_evict)
            self._require_alone("adopt")
            require_ids(blocks, self.num_blocks)
            taken = require_free(self._ledger, blocks, evicts)
            self._ledger.act("adopt", name)
            return adopt(self._book, taken, name)
        finally:
            self._gate.leave_with_result()

    def evict(self, num_blocks: object) -> npt.NDArray[np.int32]:
        """Let the next `num_blocks` idle cached blocks lose their content; their ids in that order, int32 (n,).

        They are free, and the next to be taken. O(num_blocks), or what the policy takes; blocks that cache nothing and
        stand before them are passed once, not at every call. Raises `OutOfBlocks` when fewer are idle and cached,
        `InvalidArgument`, and `PolicyError`.
        """
        self._gate.enter("evict")
        try:
            count = require_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            self._require_alone("evict")
            self._ledger.act("evict", "")
            return np.array(evict_idle(self._ledger, count), dtype=np.int32)
        finally:
            self._gate.leave_with_result()

    # The prefix cache.

    def cache_full_blocks(
        self, lease: object, token_ids: object, num_cached_blocks: object = 0, extra_keys: object = ()
    ) -> None:
        """Index the blocks of `lease` as the prompt `token_ids`, whose keys and values they hold now. O(tokens).

        token_ids: the tokens from the start of the sequence; only full blocks are indexed.
        num_cached_blocks: leading blocks of the lease that are indexed already, by a hit or an earlier call.
        `cache_next_blocks` needs the new tokens alone. What another lease has cached is cached once more: equal blocks
        are not merged, and lookups find the one that was cached first.
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

        token_ids: the tokens behind the lease's cached blocks, or none; of what fills no block nothing is kept, so
            give it again. A contiguous int32 array of many whole blocks is read as it lies.
        extra_keys: LoRA and CacheSalt count for a prompt's first block alone, and the chain carries them on. A Span has
            its position in the prompt, and may reach out of these tokens on both sides; tokens below 0, placeholders of
            an engine's own, may stand under spans alone.
        num_cached_blocks: where the caller stands, for one that goes back: blocks that have these tokens already stay
            as they are, and those that hang on a content that is gone (`uncache`) are linked anew.
        Returns the lease's `num_cached_blocks` now: the block at which the tokens of the next call begin. Equal blocks
        of two leases are not merged (see `cache_full_blocks`). What comes before is the last cached block itself, not
        what a hash says of it. Raises `StaleBlocks` when blocks that the lease had cached have lost their content,
        `InvalidArgument` when the tokens fill more blocks than the lease has, for a block that caches other
        tokens, or that others hold too (unless it had these very tokens before), and as `free_blocks` does.
        """
        self._gate.enter("cache_next_blocks")
        try:
            self._require_tokens()
            chunk = make_chunk(token_ids, extra_keys, self.block_size) if has_tokens(token_ids) else None
            asked = -1
            if num_cached_blocks is not None:
                asked = require_int("num_cached_blocks", num_cached_blocks, 0, MAX_BLOCKS)
            held = self._book.require_live(lease)
            if self.enable_prefix_caching and chunk is not None:
                cache_next(self._ledger, held, chunk, asked)
            return held.num_cached_blocks
        finally:
            self._gate.leave()

    def find_cached_blocks(self, token_ids: object, extra_keys: object = ()) -> FoundBlocks:
        """The longest run of cached blocks that `token_ids` begins with, not held. O(blocks found).

        A question: the order of eviction and the policy know nothing of it. `hold` takes what it returns, as long as
        it is still there, and tells a guard what was not found: let it take an empty answer too. A Span may end behind
        the tokens.
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
            return self._hold_hit(found._blocks[:count], "hold", name, 0, more, found)
        finally:
            self._gate.leave_with_result()

    def get_cached_blocks(self, token_ids: object, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold the longest run of cached blocks that `token_ids` begins with; maybe none. O(blocks found).

        The lease is counted before it is returned, so nothing can evict it in between (I8).
        """
        self._gate.enter("get_cached_blocks")
        try:
            name = require_str("holder", holder)
            prompt = self._make_prompt(token_ids, extra_keys)
            found = find_computed(self._ledger, prompt)
            lease = self._hold_hit(self._ledger.index.found[:found], "get_cached_blocks", name)
            note_misses(self._ledger, prompt, lease._blocks, found)
            return lease
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

    def _hold_hit(
        self,
        blocks: vec[i32],
        call: str,
        holder: str,
        first_block: i64 = 0,
        more: i64 = 0,
        found: FoundBlocks | None = None,
    ) -> BlockLease:
        """A lease on cached blocks and `more` new ones. A policy that fails, or is interrupted when it is told, leaves
        all as it was."""
        ledger = self._ledger
        count = i64(len(blocks))
        require_countable(ledger, blocks, 0, count)
        ledger.act(call, holder)
        lease = self._book.make(blocks, holder)
        lease._num_cached = count
        lease._num_sure = count
        lease._first_block = first_block
        peak = ledger.peak_used_blocks
        ledger.note_hits(blocks, 0, count)
        ledger.share(blocks, 0, count)
        if self._gate.interruption.error is not None:
            self._let_go(lease, peak)
            self._gate.interruption.raise_now()
        if found is not None:
            # Before the new blocks evict: a guard knows then that these contents are in use.
            note_missed_keys(ledger, found._missed)
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

    # The size and checks.

    def resize(self, num_blocks: object) -> Resize:
        """Grow or shrink to `num_blocks` blocks, the null block included. O(num_blocks); never moves a held block.

        Growing is done at once. Shrinking evicts the idle blocks beyond the end, and answers DEFERRED while some are
        held there: each goes when it is freed (`num_retiring_blocks`). Raises `InvalidArgument`, `NotEnoughMemory`.
        """
        self._gate.enter("resize")
        try:
            target = require_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
            self._require_alone("resize")
            return self._ledger.resize(target, self._ledger.make_room(target))
        finally:
            self._gate.leave()

    def check(self) -> None:
        """Verify what the pool alone can know: I1, I4, the counts, and that its leases add up to them. O(num_blocks).

        Raises `InvariantError`.
        """
        self._gate.enter("check")
        try:
            self._ledger.check()
            check_leases(self._ledger, self._book.leases(), not self.is_managed)
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
        PoolRecords.__init__(self, book.ledger, gate, "KVCacheManager", history)
        self._book = book
        gate.deferred.append(book)
