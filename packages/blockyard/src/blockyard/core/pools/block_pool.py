"""The pool that knows tokens: blocks handed out as leases, and found again by their tokens."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import RetentionEnds
from ...arguments import shown
from ...cache_options import MAX_BLOCKS, MAX_HISTORY
from ...config import MAX_BLOCK_SIZE
from ...errors import InvalidArgument, OutOfBlocks, not_enough_memory
from ...hash_seeds import hash_seed_or_drawn
from ...kv_events import KVCacheEvents
from ..blocks.by_id import evict_idle, require_free, require_ids, uncache
from ..blocks.caching import (
    FoundBlocks,
    cache_next,
    cache_prompt,
    find_full,
    found_blocks,
    require_found,
)
from ..blocks.eviction import wished_end, wished_policy, wished_priority
from ..blocks.lease import BlockLease, adopt, grow
from ..blocks.ledger import BlockLedger
from ..face import read_bool, read_int, read_str
from ..index.prompt import Prompt, has_tokens, make_chunk
from ..store.event_reader import EventReader
from ..tokens import int64_items
from .standalone_pool import StandalonePool


class BlockPool(StandalonePool):
    """Blocks of `block_size` tokens: counted, handed out, found again by their tokens, evicted.

    Block 0 is the null block, a placeholder in block tables; the others have ids 1 to num_blocks - 1 that never
    change. A block is in the free queue exactly when its ref_cnt is 0 (I1). A cached block stays in the index
    while it waits there, until a hit revives it or an allocation evicts it, each in O(1) (I4).

    It is used alone, through leases: a `KVCacheManager` has a pool of its own. One call runs at a time
    (`blockyard.core.gate`).

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
        *,
        enable_prefix_caching: object = True,
        hash_seed: object = None,
        history_size: object = 0,
        eviction_policy: object = "lru",
        retention_blocks: object = 0,
        residency_sample: object = 0,
        enable_kv_cache_events: object = False,
    ) -> None:
        blocks = read_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        size = read_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        caching = read_bool("enable_prefix_caching", enable_prefix_caching)
        seed = hash_seed_or_drawn(hash_seed)
        events = read_int("history_size", history_size, 0, MAX_HISTORY)
        retained = read_int("retention_blocks", retention_blocks, 0, MAX_BLOCKS)
        sample = read_int("residency_sample", residency_sample, 0, MAX_BLOCKS)
        is_told = read_bool("enable_kv_cache_events", enable_kv_cache_events)
        try:
            ledger = BlockLedger(blocks, size, size, caching, seed)
            super().__init__(ledger, retained, events, sample)
            self._events = EventReader(ledger, [], 1) if is_told else None
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {blocks}; the system has no memory for its arrays", error)
        self._order.install(wished_policy(eviction_policy, self._ledger))

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
            require_ids(blocks, int(self._ledger.capacity))
            return uncache(self._ledger, blocks)
        finally:
            self._gate.leave()

    def adopt(self, block_ids: object, *, holder: object = "", may_evict: object = True) -> BlockLease:
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
            name = read_str("holder", holder)
            evicts = read_bool("may_evict", may_evict)
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
            count = read_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            self._ledger.act("evict", "")
            return np.array(evict_idle(self._ledger, count), dtype=np.int32)
        finally:
            self._gate.leave_with_result()

    # The prefix cache.

    def cache_full_blocks(
        self, lease: object, token_ids: object, *, num_cached_blocks: object = 0, extra_keys: object = ()
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
            prompt = make_chunk(token_ids, extra_keys, self.block_size).at(0, self.block_size)
            num_full = prompt.num_tokens // i64(self.block_size)
            first = i64(read_int("num_cached_blocks", num_cached_blocks, 0, int(num_full)))
            held = self._book.require_live(lease)
            if self.enable_prefix_caching:
                cache_prompt(self._ledger, held, prompt, first, num_full)
        finally:
            self._gate.leave()

    def cache_next_blocks(
        self, lease: object, token_ids: object, num_cached_blocks: object, *, extra_keys: object = ()
    ) -> int:
        """Index the blocks after the first `num_cached_blocks` of a lease, whose tokens are `token_ids`. O(new tokens).

        token_ids: the tokens after those blocks, or none; tokens that fill no block are not kept, so give them again.
            A contiguous int32 array of many whole blocks is read without a copy.
        num_cached_blocks: blocks of the lease before these tokens, all of which it has cached: the caller's own count,
            or `lease.num_cached_blocks` if the tokens are cut there. Blocks after them that have these tokens already
            stay as they are, and those that hang on a content that is gone (`uncache`) are linked anew.
        extra_keys: LoRA and CacheSalt count for a prompt's first block alone, and the chain carries them on. A Span has
            its position in the prompt, and may reach out of these tokens on both sides; tokens below 0, placeholders of
            an engine's own, may stand under spans alone.
        Returns the lease's `num_cached_blocks` now: the block at which the tokens of the next call begin. Equal blocks
        of two leases are not merged (see `cache_full_blocks`). What comes before is the last cached block itself, not
        what a hash says of it. Raises `StaleBlocks` when one of the first `num_cached_blocks` blocks has lost its
        content, `InvalidArgument` when the lease has cached fewer, when the tokens fill more blocks than the lease
        has, for a block that caches other tokens, or that others hold too (unless it had these very tokens before), and
        as `free_blocks` does.
        """
        self._gate.enter("cache_next_blocks")
        try:
            chunk = make_chunk(token_ids, extra_keys, self.block_size) if has_tokens(token_ids) else None
            start = read_int("num_cached_blocks", num_cached_blocks, 0, MAX_BLOCKS)
            held = self._book.require_live(lease)
            if self.enable_prefix_caching and chunk is not None:
                cache_next(self._ledger, held, chunk, start)
            return held.num_cached_blocks
        finally:
            self._gate.leave()

    def find_cached_blocks(self, token_ids: object, *, extra_keys: object = ()) -> FoundBlocks:
        """The longest run of cached blocks that `token_ids` begins with, not held. O(blocks found).

        A question: the order of eviction and the policy know nothing of it. `hold` takes what it returns, as long as
        it is still there. A Span may end behind the tokens.
        """
        self._gate.enter("find_cached_blocks")
        try:
            return found_blocks(self._ledger, self._asked(token_ids, extra_keys))
        finally:
            self._gate.leave_with_result()

    def hold(
        self, found: object, *, holder: object = "", num_blocks: object = None, extend_by: object = 0
    ) -> BlockLease:
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
            name = read_str("holder", holder)
            count = len(found)
            if num_blocks is not None:
                count = read_int("num_blocks", num_blocks, 0, count)
            more = read_int("extend_by", extend_by, 0, MAX_BLOCKS)
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

    def get_cached_blocks(self, token_ids: object, *, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold the longest run of cached blocks that `token_ids` begins with; maybe none. O(blocks found).

        The lease is counted before it is returned, so nothing can evict it in between (I8).
        """
        self._gate.enter("get_cached_blocks")
        try:
            name = read_str("holder", holder)
            prompt = self._asked(token_ids, extra_keys)
            found = find_full(self._ledger, prompt)
            return self._hold_hit(found, "get_cached_blocks", name)
        finally:
            self._gate.leave_with_result()

    def get_cached_block(self, token_ids: object, *, extra_keys: object = (), holder: object = "") -> BlockLease | None:
        """Hold the one block that caches the last full block of `token_ids`, after all before it; else None."""
        self._gate.enter("get_cached_block")
        try:
            name = read_str("holder", holder)
            prompt = self._asked(token_ids, extra_keys)
            found = find_full(self._ledger, prompt)
            last = len(found) - 1
            if last < 0 or last + 1 < prompt.num_tokens // self.block_size:
                return None
            return self._hold_hit(found[last:], "get_cached_block", name, last)
        finally:
            self._gate.leave_with_result()

    def _hold_hit(self, blocks: vec[i32], call: str, holder: str, first_block: i64 = 0, more: i64 = 0) -> BlockLease:
        """A lease on cached blocks and `more` new ones. A policy that fails, or is interrupted when it is told, leaves
        all as it was."""
        self._ledger.act(call, holder)
        peak = self._ledger.peak_used_blocks
        lease = self._book.hold(blocks, holder, self._gate.interruption)
        lease._first_block = first_block
        if more > 0:
            try:
                grow(self._ledger, lease, more)
            except BaseException:
                self._book.let_go(lease, peak)
                raise
        return lease

    def num_cached_tokens(self, token_ids: object, *, extra_keys: object = ()) -> int:
        """How many leading tokens of `token_ids` stand in cached, computed blocks. Holds nothing. O(blocks)."""
        self._gate.enter("num_cached_tokens")
        try:
            return len(find_full(self._ledger, self._asked(token_ids, extra_keys))) * self.block_size
        finally:
            self._gate.leave()

    def cached_block_ids(self, token_ids: object, *, extra_keys: object = ()) -> list[int]:
        """All blocks that cache the last full block of `token_ids`, oldest first: equal content, several blocks.

        Holds nothing. O(blocks found + duplicates).
        """
        self._gate.enter("cached_block_ids")
        try:
            prompt = self._asked(token_ids, extra_keys)
            found = find_full(self._ledger, prompt)
            if len(found) == 0 or len(found) < prompt.num_tokens // self.block_size:
                return []
            return self._ledger.index.rings.members(i64(found[len(found) - 1]))
        finally:
            self._gate.leave()

    def _asked(self, token_ids: object, extra_keys: object) -> Prompt:
        """Reads a prompt for `find_full`, which checks what is behind the hit."""
        return make_chunk(token_ids, extra_keys, self.block_size, True).at(0, self.block_size)

    # What stays cached, and events.

    def retain(
        self, token_ids: object, *, priority: object = 1, expires_at: object = None, extra_keys: object = ()
    ) -> int:
        """Ask that the cached blocks `token_ids` begins with be evicted after all others. O(blocks * log retained).

        See `KVCacheManager.retain`. Returns how many blocks it concerns. Raises `OverBudget`, and `InvalidArgument`
        without `retention_blocks`.
        """
        self._gate.enter("retain")
        try:
            prompt = self._asked(token_ids, extra_keys)
            level = wished_priority(priority)
            until = wished_end(expires_at)
            blocks = [int(block) for block in find_full(self._ledger, prompt)]
            return self._order.retain(blocks, level, until)
        finally:
            self._gate.leave()

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that `retain` keeps now, held or idle; 0 without a budget. O(1)."""
        return self._order.num_retained

    @property
    def ended_retentions(self) -> RetentionEnds:
        """Count the blocks whose retention has ended so far, by cause. O(1)."""
        return self._order.ended_retentions()

    def reset(self) -> None:
        """The same as `reset_prefix_cache`."""
        self._gate.enter("reset")
        try:
            self._ledger.reset()
            self._gate.note_change()
        finally:
            self._gate.leave()

    def take_events(self) -> KVCacheEvents:
        """What prompts can hit, and can hit no more, since the last call. O(what happened).

        See `KVCacheManager.take_events`; a `KVEventPublisher` takes a pool too. Raises `InvalidArgument` unless the
        pool was made with `enable_kv_cache_events=True`.
        """
        self._gate.enter("take_events")
        try:
            if self._events is None:
                raise InvalidArgument(
                    "enable_kv_cache_events is False; events are noted with enable_kv_cache_events=True"
                )
            return self._events.take()
        finally:
            self._gate.leave_with_result()

    @property
    def enable_kv_cache_events(self) -> bool:
        """Whether this pool notes events itself, for `take_events`."""
        return self._events is not None

    def _other_holds(self) -> list[int]:
        return [0] * int(self._ledger.capacity)
