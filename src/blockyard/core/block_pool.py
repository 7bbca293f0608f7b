"""The pool: who holds each block, and what happens when nobody does."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arguments import require_bool, require_int, require_str
from ..config import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_HASH_SEED
from ..errors import DoubleFree, ForeignBlock, InvalidArgument, InvariantError, OutOfBlocks
from ..ids import NO_CONTENT, NULL_BLOCK
from .arrays import view_i32, view_i64, zeros_i32
from .block import KVCacheBlock
from .free_queue import FreeKVCacheBlockQueue
from .hashing import root_hash
from .lease import BlockLease
from .prefix_index import PrefixIndex
from .prompt import Prompt, make_prompt
from .tokens import token_array, unpack_tokens


class EvictionListener:
    """Whoever wants to save a block's content before it is gone."""

    def evicting(self, block: i64) -> None:
        """`block` is cached, and about to be taken for something else."""
        raise NotImplementedError


class BlockPool:
    """Reference counts, the free queue and the prefix index of `num_blocks` blocks of `block_size` tokens.

    Block 0 is the null block, a placeholder in block tables; the others have ids 1 to num_blocks - 1 that never
    change. A block is in the free queue exactly when its ref_cnt is 0 (I1). A cached block stays in the index
    while it waits there, until a hit revives it or an allocation evicts it, each in O(1) (I4).

    Use it alone, through leases, or under a `KVCacheManager`, whose sequences hold blocks by their table rows.

    Raises `InvalidArgument` for sizes outside their limits.

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
        hash_seed: object = 0,
    ) -> None:
        self.num_blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
        self.block_size = require_int("block_size", block_size, 1, MAX_BLOCK_SIZE)
        self.enable_prefix_caching = require_bool("enable_prefix_caching", enable_prefix_caching)
        seed = require_int("hash_seed", hash_seed, 0, MAX_HASH_SEED)
        # Largest arrays first: the allocator fits the smaller ones into what their making leaves behind.
        self.index = PrefixIndex(self.num_blocks, self.block_size, seed)
        self.queue = FreeKVCacheBlockQueue(self.num_blocks)
        self.ref_cnt = zeros_i32(self.num_blocks)
        self._one = zeros_i32(1)
        #: Told of each cached block before it is evicted.
        self.listener: EvictionListener | None = None
        self.num_evicted_blocks: i64 = 0
        self.peak_used_blocks: i64 = 0
        self._leases: dict[int, BlockLease] = {}
        self._last_lease = 0

    # What is there.

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included. O(1)."""
        return int(self.queue.num_free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds. O(1)."""
        return self.num_usable_blocks - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the index, held or not. O(1)."""
        return int(self.index.num_indexed)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0 to 1. O(1)."""
        return self.num_used_blocks / self.num_usable_blocks

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """How often each block is held, int32 (num_blocks,), read-only, live."""
        return view_i32(self.ref_cnt)

    def cached_mask(self) -> npt.NDArray[np.bool_]:
        """Which blocks are in the index, bool (num_blocks,), a copy."""
        cached: npt.NDArray[np.bool_] = view_i64(self.index.identity)[::2] != 0
        return cached

    def free_block_ids(self) -> npt.NDArray[np.int32]:
        """The free blocks in the order in which they will be allocated, int32 (num_free_blocks,), a copy."""
        return np.array(self.queue.block_ids(), dtype=np.int32)

    def leases(self) -> list[BlockLease]:
        """The leases not given back yet, oldest first: the leak report of whoever uses the pool alone."""
        return list(self._leases.values())

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it. O(leases)."""
        number = require_int("block_id", block_id, 0, self.num_blocks - 1)
        block = i64(number)
        cached = self.index.identity[2 * block] != NO_CONTENT
        return KVCacheBlock(
            number,
            int(self.ref_cnt[block]),
            self.block_tokens(vec[i32]([i32(block)]), self.block_size).tolist() if cached else [],
            int(self.index.chain_hash[block]) if cached else None,
            self.index.owner[block] == 0,
            [lease.holder for lease in self._leases.values() if number in list(lease)],
        )

    def block_tokens(self, blocks: vec[i32], num_tokens: int) -> npt.NDArray[np.int32]:
        """The first `num_tokens` tokens stored for a run of blocks, int32 (num_tokens,), a copy."""
        first = int(self.index.first_word)
        num_words = int(self.index.num_words)
        rows = view_i64(self.index.words)[first : first + self.num_blocks * num_words].reshape(-1, num_words)
        return unpack_tokens(rows[view_i32(blocks)], self.block_size, num_tokens)

    # Leases: the pool used alone.

    def get_new_blocks(self, num_blocks: object, holder: object = "") -> BlockLease:
        """Hold `num_blocks` blocks from the head of the free queue, evicting what they cached. O(num_blocks).

        holder: a name for errors and leak reports.
        Raises `OutOfBlocks` when fewer are free, `InvalidArgument` for a count below 0.
        """
        count = require_int("num_blocks", num_blocks, 0, MAX_BLOCKS)
        name = require_str("holder", holder)
        if count > self.queue.num_free:
            raise OutOfBlocks(
                f"num_blocks is {count}; only {self.num_free_blocks} of {self.num_usable_blocks} blocks are free",
                count,
                self.num_free_blocks,
            )
        blocks = zeros_i32(count)
        self.acquire(blocks, 0, count)
        return self._lease(blocks, name)

    def extend(self, lease: object, num_blocks: object) -> None:
        """Add `num_blocks` new blocks to a live lease, as after a hit. O(blocks). Raises as `get_new_blocks` does."""
        held = self._require_live(lease)
        new = self.get_new_blocks(num_blocks, held.holder)
        both = np.concatenate([held.block_ids, new.block_ids])
        del self._leases[new.serial]
        held.blocks = vec[i32](both)

    def touch(self, lease: object, holder: object = "") -> BlockLease:
        """Hold the blocks of a live lease once more, for another holder. O(blocks). Raises as `free_blocks` does."""
        name = require_str("holder", holder)
        blocks = self._require_live(lease).blocks[:]
        self.share(blocks, 0, len(blocks))
        return self._lease(blocks, name)

    def free_blocks(self, lease: object) -> None:
        """Give a lease back, last block first. O(blocks).

        Blocks that nobody holds any more go to the tail of the free queue if cached, to its front if not.
        Raises `DoubleFree` for a lease already given back, `ForeignBlock` for one of another pool.
        """
        held = self._require_live(lease)
        del self._leases[held.serial]
        self.release(held.blocks, 0, len(held.blocks))

    def cache_full_blocks(
        self, lease: object, token_ids: object, num_cached_blocks: object = 0, extra_keys: object = ()
    ) -> None:
        """Index the blocks of `lease` as the prompt `token_ids`, whose keys and values they hold now. O(tokens).

        token_ids: the tokens from the start of the sequence; only full blocks are indexed.
        num_cached_blocks: leading blocks of the lease that are indexed already, by a hit or an earlier call.
        Raises `InvalidArgument` when the tokens fill more blocks than the lease has, when a leading block
        is not cached, or when another one is.
        """
        held = self._require_live(lease)
        self._require_tokens()
        prompt = make_prompt(token_ids, extra_keys, self.block_size)
        num_full = prompt.num_tokens // i64(self.block_size)
        first = i64(require_int("num_cached_blocks", num_cached_blocks, 0, int(num_full)))
        if not self.enable_prefix_caching:
            return
        self._check_cacheable(held, first, num_full)
        self._check_prefix(held, prompt, first)
        self.index_prompt(prompt, first, num_full, held.blocks, 0, 0)

    def get_cached_blocks(self, token_ids: object, extra_keys: object = (), holder: object = "") -> BlockLease:
        """Hold the longest run of cached blocks that `token_ids` begins with; maybe none. O(blocks found).

        The lease is counted before it is returned, so nothing can evict it in between (I8).
        """
        name = require_str("holder", holder)
        found = self._find_computed(token_ids, extra_keys)
        blocks = self.index.found[:found]
        self.share(blocks, 0, found)
        return self._lease(blocks, name)

    def get_cached_block(self, token_ids: object, extra_keys: object = (), holder: object = "") -> BlockLease | None:
        """Hold the one block that caches the last full block of `token_ids`, after all before it; else None."""
        name = require_str("holder", holder)
        found = self._find_computed(token_ids, extra_keys)
        if found == 0 or found < len(token_array(token_ids)) // self.block_size:
            return None
        blocks = self.index.found[found - 1 : found]
        self.share(blocks, 0, 1)
        return self._lease(blocks, name)

    def num_cached_tokens(self, token_ids: object, extra_keys: object = ()) -> int:
        """How many leading tokens of `token_ids` stand in cached, computed blocks. Holds nothing. O(blocks)."""
        return int(self._find_computed(token_ids, extra_keys)) * self.block_size

    def _find_computed(self, token_ids: object, extra_keys: object) -> i64:
        """Leading blocks whose keys and values are there; their ids are in `index.found`."""
        self._require_tokens()
        prompt = make_prompt(token_ids, extra_keys, self.block_size)
        found = self.find(prompt, prompt.num_tokens // i64(self.block_size))
        if self.index.num_pending == 0:
            return found
        owner = self.index.owner
        blocks = self.index.found
        for position in range(found):
            if owner[i64(blocks[position])] != 0:
                return position
        return found

    def _require_tokens(self) -> None:
        """Raise `InvalidArgument` where blocks are not known by their tokens (`ContentPool`)."""

    def reset(self) -> None:
        """Forget all cached content at once; blocks stay with their holders. O(num_blocks)."""
        self.index.clear()

    # The same, for a holder that keeps its own books: the manager. Arguments are checked by the caller.

    def find(self, prompt: Prompt, max_blocks: i64) -> i64:
        """Look up the first `max_blocks` blocks of a prompt; those found are in `index.found` and not held yet.

        The chain of hashes and identities begins anew at each block that a span overlaps: what stands there, together
        with all before it, has a root of its own.
        """
        root = self.index.known_root(prompt.keys)
        first: i64 = 0
        for position in prompt.span_blocks:
            if root == NO_CONTENT or position >= max_blocks:
                break
            reached = self.index.find_prefix(prompt.words, first, position, root)
            if reached < position:
                return reached
            parent = self.index.identity[2 * i64(self.index.found[position - 1])] if position > 0 else root
            root = self.index.known_root((int(parent), prompt.spans[position]))
            first = position
        if root == NO_CONTENT:
            return first
        return self.index.find_prefix(prompt.words, first, max_blocks, root)

    def index_prompt(self, prompt: Prompt, first: i64, last: i64, blocks: vec[i32], start: i64, owner: i64) -> None:
        """Store and index blocks `first` to `last` of a prompt in `blocks[start + first:]`, after those before."""
        index = self.index
        while first < last:
            before = i64(blocks[start + first - 1]) if first > 0 else NULL_BLOCK
            parent = index.identity[2 * before] if first > 0 else index.root(prompt.keys)
            chain = index.chain_hash[before] if first > 0 else root_hash(parent)
            if first in prompt.spans:
                parent = index.root((int(parent), prompt.spans[first]))
                chain = root_hash(parent)
            end = min(prompt.next_span_block(first), last)
            index.hash_run(prompt.words, first, end, chain)
            index.insert_run(prompt.words, first, end, blocks, start, parent, owner)
            first = end

    def count_idle(self, blocks: vec[i32], count: i64) -> i64:
        """How many of the first `count` blocks nobody holds."""
        ref_cnt = self.ref_cnt
        idle: i64 = 0
        for index in range(count):
            if ref_cnt[i64(blocks[index])] == 0:
                idle += 1
        return idle

    def acquire(self, out: vec[i32], start: i64, count: i64) -> None:
        """Take `count` blocks, which must be free, from the head of the queue into `out[start:]`."""
        self.queue.popleft_n(out, start, count)
        ref_cnt = self.ref_cnt
        identity = self.index.identity
        cached: i64 = 0
        for position in range(start, start + count):
            block = i64(out[position])
            ref_cnt[block] = 1
            if identity[2 * block] != NO_CONTENT:
                cached += 1
        if cached > 0:
            self._evict(out, start, count)
        self._note_peak()

    def _evict(self, blocks: vec[i32], start: i64, count: i64) -> None:
        self.index.load_run(blocks, start, count)
        for position in range(start, start + count):
            block = i64(blocks[position])
            if self.index.identity[2 * block] != NO_CONTENT:
                if self.listener is not None:
                    self.listener.evicting(block)
                self.index.remove(block)
                self.num_evicted_blocks += 1

    def share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Hold `blocks[start:start + count]` once more; idle ones are revived out of the queue."""
        ref_cnt = self.ref_cnt
        for index in range(start, start + count):
            block = i64(blocks[index])
            references = ref_cnt[block]
            if references == 0:
                self.queue.remove(block)
            ref_cnt[block] = references + 1
        self._note_peak()

    def release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Let go of `blocks[start:start + count]`, last first."""
        ref_cnt = self.ref_cnt
        identity = self.index.identity
        queue = self.queue
        index = start + count - 1
        while index >= start:
            block = i64(blocks[index])
            references = ref_cnt[block] - 1
            ref_cnt[block] = references
            if references == 0:
                if identity[2 * block] != NO_CONTENT:
                    queue.append(block)
                else:
                    queue.append_left(block)
            index -= 1

    def acquire_one(self) -> i64:
        """Take one block, which must be free, from the head of the queue."""
        self.acquire(self._one, 0, 1)
        return i64(self._one[0])

    def share_one(self, block: i64) -> None:
        """Hold one block once more."""
        self._one[0] = i32(block)
        self.share(self._one, 0, 1)

    def release_one(self, block: i64) -> None:
        """Let go of one block."""
        self._one[0] = i32(block)
        self.release(self._one, 0, 1)

    def copy_words(self, source: i64, target: i64) -> None:
        """Copy the stored tokens of one block to another."""
        num_words = self.index.num_words
        stored = self.index.words
        start = self.index.first_word
        for word in range(num_words):
            stored[start + target * num_words + word] = stored[start + source * num_words + word]

    def _note_peak(self) -> None:
        used = i64(self.num_blocks) - 1 - self.queue.num_free
        if used > self.peak_used_blocks:
            self.peak_used_blocks = used

    # Checks.

    def _lease(self, blocks: vec[i32], holder: str) -> BlockLease:
        self._last_lease += 1
        lease = BlockLease(self._last_lease, holder, blocks, self._leases)
        self._leases[self._last_lease] = lease
        return lease

    def _require_live(self, lease: object) -> BlockLease:
        if not isinstance(lease, BlockLease):
            raise InvalidArgument(f"lease is {lease!r}; it must be a BlockLease, as get_new_blocks returns it")
        if self._leases.get(lease.serial) is lease:
            return lease
        if lease.ledger is self._leases:
            raise DoubleFree(f"lease {lease.serial} of {lease.holder!r} on blocks {list(lease)} was already given back")
        raise ForeignBlock(f"lease {lease.serial} of {lease.holder!r} was handed out by another pool")

    def _check_cacheable(self, lease: BlockLease, num_cached: i64, num_full: i64) -> None:
        if num_full > len(lease.blocks):
            raise InvalidArgument(f"token_ids fill {num_full} blocks; the lease has {len(lease.blocks)}")
        for position in range(num_full):
            block = lease.blocks[position]
            cached = self.index.identity[2 * i64(block)] != NO_CONTENT
            if cached != (position < num_cached):
                state = "already" if cached else "not"
                raise InvalidArgument(
                    f"num_cached_blocks is {num_cached}, but block {block} at position {position} is {state} cached"
                )

    def _check_prefix(self, lease: BlockLease, prompt: Prompt, num_cached: i64) -> None:
        """The leading blocks must cache these very tokens, or what follows would be indexed under a wrong prefix."""
        found = self.find(prompt, num_cached)
        for position in range(num_cached):
            block = i64(lease.blocks[position])
            wanted = i64(self.index.found[position]) if position < found else NULL_BLOCK
            if self.index.identity[2 * block] != self.index.identity[2 * wanted]:
                raise InvalidArgument(f"token_ids differ from what block {block} at position {position} caches")

    def check(self) -> None:
        """All laws that the pool alone can know: I1, I4 and the counts. O(num_blocks). Raises `InvariantError`."""
        self.queue.check()
        free = set(self.queue.block_ids())
        for block in range(1, self.num_blocks):
            if (self.ref_cnt[i64(block)] == 0) != (block in free):
                raise InvariantError(
                    f"I1: block {block} has ref_cnt {self.ref_cnt[i64(block)]}, in queue: {block in free}"
                )
        if self.ref_cnt[NULL_BLOCK] != 0 or self.index.identity[0] != NO_CONTENT or NULL_BLOCK in free:
            raise InvariantError("I1: the null block is held, cached or free")
        if self.num_free_blocks + self.num_used_blocks != self.num_usable_blocks:
            raise InvariantError("I6: free and used blocks do not add up to the pool")
        self.index.check()
