"""`BlockPool`: leases of blocks that are found again by their tokens."""

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
from ..blocks.eviction import read_expiry, read_priority, resolve_policy
from ..blocks.lease import BlockLease, adopt, grow
from ..blocks.ledger import BlockLedger
from ..face import read_bool, read_int, read_str
from ..index.prompt import Prompt, has_tokens, make_chunk
from ..store.event_reader import EventReader
from ..tokens import int64_items
from ..waiting.lookups import Lookups
from ..waiting.queue import WaitingQueue
from ..waiting.requests import WaitingRequests
from .standalone_pool import StandalonePool


class BlockPool(StandalonePool):
    """A block manager without sequences, for engines with a scheduler of their own: leases and a prefix cache.

    Block 0 is the null block, a placeholder in block tables; the others have ids 1 to num_blocks - 1. A block is in the
    free queue exactly when nobody holds it (I1). A cached block stays in the index while it is there, until a hit
    revives it or an allocation evicts it, each in O(1) (I4). One call runs at a time, as in `KVCacheManager`.

    Args:
        num_blocks: blocks of the pool, the null block included; 1 to 2**27.
        block_size: tokens in a block; 1 to 4096.
        enable_prefix_caching: whether full blocks are indexed.
        hash_seed: seed of the index's hash function, as in `CacheConfig`.
        history_size: events that `history` remembers; 0 for none.
        eviction_policy: which idle cached block is evicted first, as in `CacheConfig`.
        retention_blocks: blocks that `retain` may protect from eviction at a time; 0 turns retention off.
        residency_sample: follow every n-th block from allocation to eviction (`residency`); 0 for none.
        enable_kv_cache_events: whether `take_events` returns which blocks were cached and removed.

    Raises:
        InvalidArgument: if a value is outside its limits.
        NotEnoughMemory: if the system has no memory for the pool.
        PolicyError: if making the eviction policy raises.

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
            self._waiting: WaitingQueue | None = None
        except MemoryError as error:
            raise not_enough_memory(f"num_blocks is {blocks}; the system has no memory for its arrays", error)
        self._order.install(resolve_policy(eviction_policy, self._ledger))

    # Blocks by their ids.

    def uncache(self, block_ids: object) -> int:
        """Remove the content of blocks from the index, held or not, for instance after a failed load. O(blocks).

        Neither they nor the blocks cached after them can be hit until `cache_next_blocks` caches them again. Idle ones
        are allocated next.

        Args:
            block_ids: ids of blocks, integers (n,); those that are not cached are skipped.

        Returns:
            How many blocks lost their content.

        Raises:
            InvalidArgument: if there is no such block.
        """
        self._gate.enter("uncache")
        try:
            blocks = int64_items("block_ids", block_ids)
            require_ids(blocks, int(self._ledger.capacity))
            return uncache(self._ledger, blocks)
        finally:
            self._gate.leave()

    def adopt(self, block_ids: object, *, holder: object = "", may_evict: object = True) -> BlockLease:
        """Make a lease of free blocks that the caller names, for an engine that allocates blocks itself. O(blocks).

        Such a pool only caches the blocks that it is given; `evict` says which ones to use again.

        Args:
            block_ids: different free blocks, integers (n,).
            holder: a name for errors and leak reports.
            may_evict: whether cached blocks among them are evicted; False refuses them.

        Raises:
            InvalidArgument: if a block is held, is named twice, does not exist, or is cached with `may_evict=False`.
        """
        self._gate.enter("adopt")
        try:
            blocks = int64_items("block_ids", block_ids)
            name = read_str("holder", holder)
            evicts = read_bool("may_evict", may_evict)
            require_ids(blocks, self.num_blocks)
            taken = require_free(self._ledger, blocks, evicts)
            self._ledger.act("adopt", name)
            return adopt(self._leases, taken, name)
        finally:
            self._gate.leave_with_result()

    def evict(self, num_blocks: object) -> npt.NDArray[np.int32]:
        """Uncache the next idle cached blocks in eviction order. They stay free and are allocated next. O(num_blocks).

        Blocks that are not cached and precede them in the queue are passed only once, not at every call.

        Args:
            num_blocks: number of blocks.

        Returns:
            Their ids in that order, int32 (num_blocks,).

        Raises:
            OutOfBlocks: if fewer are idle and cached.
            InvalidArgument: if the number is outside its limits.
            PolicyError: if the eviction policy raised.
        """
        self._gate.enter("evict")
        try:
            count = read_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
            self._ledger.act("evict", "")
            return np.array(evict_idle(self._ledger, count), dtype=np.int32)
        finally:
            self._gate.leave_with_result()

    # The prefix cache.

    def waiting(self) -> WaitingQueue:
        """Return the index of waiting requests, made at the first call. It costs nothing before that. O(1).

        A request lacks the tokens that `find_cached_blocks` does not find, and always its last token.
        """
        self._gate.enter("waiting")
        try:
            if self._waiting is None:
                lookups = Lookups(self._ledger.index, self._ledger, self.block_size)
                self._waiting = WaitingQueue(WaitingRequests(self._gate, lookups))
            return self._waiting
        finally:
            self._gate.leave()

    def cache_full_blocks(
        self, lease: object, token_ids: object, *, num_cached_blocks: object = 0, extra_keys: object = ()
    ) -> None:
        """Index the full blocks of a lease by the tokens whose keys and values they hold. O(tokens).

        `cache_next_blocks` needs only the new tokens. Equal blocks of two leases are not merged; lookups find the one
        that was cached first.

        Args:
            lease: a lease that is not freed.
            token_ids: all tokens from the start of the sequence, integers (n,).
            num_cached_blocks: leading blocks of the lease that are cached already, by a hit or an earlier call.
            extra_keys: what else the keys and values depend on (`blockyard.keys`).

        Raises:
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if the tokens fill more blocks than the lease has, a leading block is not cached, or
                another one is.
        """
        self._gate.enter("cache_full_blocks")
        try:
            prompt = make_chunk(token_ids, extra_keys, self.block_size).at(0, self.block_size)
            num_full = prompt.num_tokens // i64(self.block_size)
            first = i64(read_int("num_cached_blocks", num_cached_blocks, 0, int(num_full)))
            held = self._leases.require_live(lease)
            if self.enable_prefix_caching:
                cache_prompt(self._ledger, held, prompt, first, num_full)
        finally:
            self._gate.leave()

    def cache_next_blocks(
        self, lease: object, token_ids: object, num_cached_blocks: object, *, extra_keys: object = ()
    ) -> int:
        """Index further full blocks of a lease by their tokens. O(new tokens).

        Blocks that already cache these tokens stay as they are. Blocks whose predecessor lost its content are linked to
        it again. Equal blocks of two leases are not merged. The preceding content is identified by the last cached
        block itself, not by a hash.

        Args:
            lease: a lease that is not freed.
            token_ids: tokens that follow the first `num_cached_blocks` blocks, integers (n,). Tokens at the end that do
                not fill a block are ignored: pass them again. A contiguous int32 array is read without a copy.
            num_cached_blocks: blocks of the lease before these tokens, all cached by it: the caller's count, or
                `lease.num_cached_blocks` if the tokens begin there.
            extra_keys: LoRA and CacheSalt count only with the first block of a sequence. Span positions count from the
                start of the sequence; a span may extend past either end of these tokens. Tokens below 0 (an engine's
                placeholders) are allowed only under spans.

        Returns:
            `lease.num_cached_blocks`: the block at which the tokens of the next call begin.

        Raises:
            StaleBlocks: if one of the first `num_cached_blocks` blocks has lost its content.
            DoubleFree: if the lease has been freed.
            ForeignBlock: if the lease belongs to another pool.
            InvalidArgument: if the lease has cached fewer blocks, the tokens fill more blocks than it has, or a block
                caches other tokens or is held by others too (unless it had these tokens before).
        """
        self._gate.enter("cache_next_blocks")
        try:
            chunk = make_chunk(token_ids, extra_keys, self.block_size) if has_tokens(token_ids) else None
            start = read_int("num_cached_blocks", num_cached_blocks, 0, MAX_BLOCKS)
            held = self._leases.require_live(lease)
            if self.enable_prefix_caching and chunk is not None:
                cache_next(self._ledger, held, chunk, start)
            return held.num_cached_blocks
        finally:
            self._gate.leave()

    def find_cached_blocks(self, token_ids: object, *, extra_keys: object = ()) -> FoundBlocks:
        """Find the longest run of cached blocks at the beginning of `token_ids`, without holding them. O(blocks found).

        The eviction policy does not count it as a hit. `hold` holds the result, if it is still cached.

        Args:
            token_ids: tokens from the start of a sequence, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`). A Span may end after the tokens.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("find_cached_blocks")
        try:
            return found_blocks(self._ledger, self._read_prompt(token_ids, extra_keys))
        finally:
            self._gate.leave_with_result()

    def hold(
        self, found: object, *, holder: object = "", num_blocks: object = None, extend_by: object = 0
    ) -> BlockLease:
        """Hold blocks that `find_cached_blocks` found, and new ones after them. O(blocks).

        The new blocks never evict the found ones. The tokens are not compared again, because each content has a unique
        id.

        Args:
            found: result of `find_cached_blocks`.
            holder: a name for errors and leak reports.
            num_blocks: how many of the found blocks to hold; None for all.
            extend_by: number of new blocks.

        Raises:
            StaleBlocks: if a block has another content by now.
            ForeignBlock: if another pool found them.
            OutOfBlocks: if fewer than `extend_by` other blocks are free.
            InvalidArgument: if an argument is outside its limits.
            PolicyError: if the eviction policy raised; nothing has changed.
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
                    f"extend_by is {more}; besides the {idle} idle ones found, only {self.num_free_blocks - idle} of "
                    f"{self.num_usable_blocks} blocks are free",
                    more + idle,
                    self.num_free_blocks,
                )
            return self._hold_hit(found._blocks[:count], "hold", name, 0, more)
        finally:
            self._gate.leave_with_result()

    def get_cached_blocks(self, token_ids: object, *, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold the longest run of cached blocks at the beginning of `token_ids`. O(blocks found).

        Args:
            token_ids: tokens from the start of a sequence, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            holder: a name for errors and leak reports.

        Returns:
            A lease, possibly empty. Nothing can evict the blocks before it is returned (I8).

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("get_cached_blocks")
        try:
            name = read_str("holder", holder)
            prompt = self._read_prompt(token_ids, extra_keys)
            found = find_full(self._ledger, prompt)
            return self._hold_hit(found, "get_cached_blocks", name)
        finally:
            self._gate.leave_with_result()

    def get_cached_block(self, token_ids: object, *, extra_keys: object = (), holder: object = "") -> BlockLease | None:
        """Hold the block that caches the last full block of `token_ids`. O(blocks found).

        Args:
            token_ids: tokens from the start of a sequence, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).
            holder: a name for errors and leak reports.

        Returns:
            A lease of one block; None if that block, or one before it, is not cached.

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("get_cached_block")
        try:
            name = read_str("holder", holder)
            prompt = self._read_prompt(token_ids, extra_keys)
            found = find_full(self._ledger, prompt)
            last = len(found) - 1
            if last < 0 or last + 1 < prompt.num_tokens // self.block_size:
                return None
            return self._hold_hit(found[last:], "get_cached_block", name, last)
        finally:
            self._gate.leave_with_result()

    def _hold_hit(self, blocks: vec[i32], call: str, holder: str, first_block: i64 = 0, more: i64 = 0) -> BlockLease:
        """Return a lease of cached blocks and `more` new ones. If a policy fails, nothing has changed."""
        self._ledger.act(call, holder)
        peak = self._ledger.peak_used_blocks
        lease = self._leases.hold(blocks, holder, self._gate.interruption)
        lease._first_block = first_block
        if more > 0:
            try:
                grow(self._ledger, lease, more)
            except BaseException:
                self._leases.undo_hold(lease, peak)
                raise
        return lease

    def num_cached_tokens(self, token_ids: object, *, extra_keys: object = ()) -> int:
        """Return how many leading tokens are in cached, computed blocks. Holds nothing. O(blocks).

        Args:
            token_ids: tokens from the start of a sequence, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("num_cached_tokens")
        try:
            return len(find_full(self._ledger, self._read_prompt(token_ids, extra_keys))) * self.block_size
        finally:
            self._gate.leave()

    def cached_block_ids(self, token_ids: object, *, extra_keys: object = ()) -> list[int]:
        """Return all blocks that cache the last full block of `token_ids`, oldest first. O(blocks found).

        Several blocks can cache equal content. None is held.

        Args:
            token_ids: tokens from the start of a sequence, integers (n,).
            extra_keys: what else the keys and values depend on (`blockyard.keys`).

        Raises:
            InvalidArgument: if an argument is outside its limits.
        """
        self._gate.enter("cached_block_ids")
        try:
            prompt = self._read_prompt(token_ids, extra_keys)
            found = find_full(self._ledger, prompt)
            if len(found) == 0 or len(found) < prompt.num_tokens // self.block_size:
                return []
            return self._ledger.index.rings.members(i64(found[len(found) - 1]))
        finally:
            self._gate.leave()

    def _read_prompt(self, token_ids: object, extra_keys: object) -> Prompt:
        """Read a prompt for `find_full`, which checks the tokens after the hit."""
        return make_chunk(token_ids, extra_keys, self.block_size, True).at(0, self.block_size)

    # What stays cached, and events.

    def retain(
        self, token_ids: object, *, priority: object = 1, expires_at: object = None, extra_keys: object = ()
    ) -> int:
        """Ask that the cached blocks at the beginning of `token_ids` be evicted last. O(blocks * log retained).

        A request, not a pin: when nothing else is idle, retained blocks are evicted, the lowest priority first. Call it
        again to change the priority.

        Args:
            token_ids: tokens from the start of a sequence, integers (n,).
            priority: retention priority, 0 to 2**20; higher stays longer, 0 ends the retention.
            expires_at: time of `advance_time` at which the retention ends; None for never.
            extra_keys: what else the keys and values depend on (`blockyard.keys`).

        Returns:
            How many blocks it applies to.

        Raises:
            OverBudget: if more than `retention_blocks` blocks would be retained; then none is.
            InvalidArgument: if an argument is outside its limits, or the pool was made without `retention_blocks`.
        """
        self._gate.enter("retain")
        try:
            prompt = self._read_prompt(token_ids, extra_keys)
            level = read_priority(priority)
            until = read_expiry(expires_at)
            blocks = [int(block) for block in find_full(self._ledger, prompt)]
            return self._order.retain(blocks, level, until)
        finally:
            self._gate.leave()

    @property
    def num_retained_blocks(self) -> int:
        """Blocks that are retained now, held or idle; 0 without `retention_blocks`. O(1)."""
        return self._order.num_retained

    @property
    def ended_retentions(self) -> RetentionEnds:
        """Blocks whose retention has ended so far, by cause. O(1)."""
        return self._order.ended_retentions()

    def reset(self) -> None:
        """Uncache all blocks, the same as `reset_prefix_cache`."""
        self._gate.enter("reset")
        try:
            self._ledger.reset()
            self._gate.note_change()
        finally:
            self._gate.leave()

    def take_events(self) -> KVCacheEvents:
        """Return contents cached and uncached since the last call (`KVCacheManager.take_events`). O(events).

        Raises:
            InvalidArgument: if the pool was made without `enable_kv_cache_events=True`.
        """
        self._gate.enter("take_events")
        try:
            if self._events is None:
                raise InvalidArgument(
                    "enable_kv_cache_events is False; make the pool with enable_kv_cache_events=True to take events"
                )
            return self._events.take()
        finally:
            self._gate.leave_with_result()

    @property
    def enable_kv_cache_events(self) -> bool:
        """True if the pool records events for `take_events`."""
        return self._events is not None

    def _other_holds(self) -> list[int]:
        return [0] * int(self._ledger.capacity)
