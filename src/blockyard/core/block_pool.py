"""The pool: blocks handed out as leases, and found again by their tokens."""

import numpy as np
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arguments import require_int, require_str
from ..config import MAX_BLOCKS
from ..errors import DoubleFree, ForeignBlock, InvalidArgument, OutOfBlocks
from ..ids import NO_CONTENT, NULL_BLOCK
from .arrays import zeros_i32
from .block import KVCacheBlock
from .block_ledger import BlockLedger
from .lease import BlockLease
from .prompt import Prompt, make_prompt
from .tokens import token_array


class BlockPool(BlockLedger):
    """Blocks of `block_size` tokens: counted, handed out, found again by their tokens, evicted.

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
        super().__init__(num_blocks, block_size, enable_prefix_caching, hash_seed)
        self._leases: dict[int, BlockLease] = {}
        self._last_lease = 0

    def leases(self) -> list[BlockLease]:
        """The leases not given back yet, oldest first: the leak report of whoever uses the pool alone."""
        return list(self._leases.values())

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it. O(leases)."""
        number = require_int("block_id", block_id, 0, int(self.capacity) - 1)
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
        self._act("get_new_blocks", name)
        self.secure(count)
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
        self._act("touch", name)
        self.share(blocks, 0, len(blocks))
        return self._lease(blocks, name)

    def free_blocks(self, lease: object) -> None:
        """Give a lease back, last block first. O(blocks).

        Blocks that nobody holds any more go to the tail of the free queue if cached, to its front if not.
        Raises `DoubleFree` for a lease already given back, `ForeignBlock` for one of another pool.
        """
        held = self._require_live(lease)
        del self._leases[held.serial]
        self._act("free_blocks", held.holder)
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
        self._act("get_cached_blocks", name)
        self.note_hits(blocks, 0, found)
        self.share(blocks, 0, found)
        return self._lease(blocks, name)

    def get_cached_block(self, token_ids: object, extra_keys: object = (), holder: object = "") -> BlockLease | None:
        """Hold the one block that caches the last full block of `token_ids`, after all before it; else None."""
        name = require_str("holder", holder)
        found = self._find_computed(token_ids, extra_keys)
        if found == 0 or found < len(token_array(token_ids)) // self.block_size:
            return None
        blocks = self.index.found[found - 1 : found]
        self._act("get_cached_block", name)
        self.note_hits(blocks, 0, 1)
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

    def cached_block_ids(self, token_ids: object, extra_keys: object = ()) -> list[int]:
        """All blocks that cache the last full block of `token_ids`, oldest first: equal content, several blocks.

        Holds nothing. O(blocks found + duplicates).
        """
        found = self._find_computed(token_ids, extra_keys)
        if found == 0 or found < len(token_array(token_ids)) // self.block_size:
            return []
        return self.index.equal_blocks(i64(self.index.found[found - 1]))

    def _act(self, action: str, holder: str) -> None:
        """Say to whoever listens which call this is, and for whom."""
        if self.observer is not None:
            self.observer.acting(f"{action} {holder}" if holder else action)

    # Checks of arguments.

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
