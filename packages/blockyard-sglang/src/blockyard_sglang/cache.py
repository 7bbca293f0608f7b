"""SGLang's prefix cache on a `BlockPool`: its scheduler, its allocator and its kernels stay as they are.

A page of SGLang's is a block of the same number: its slot 0 is a padding, as block 0 of a pool is the null block. Its
allocator hands out pages and takes them back; the pool has those that were cached, and says which to use again. Blocks
are compared by their tokens, extra key and salt. Equal pages are merged, as in SGLang's own cache: the request's are
freed, and its row points at those that are cached. A match is a `Node`, which SGLang's scheduler can lock, where
its own cache gives a node of a tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
    TreeLock,
)

from blockyard import (
    BlockLease,
    BlockPool,
    CacheSalt,
    FoundBlocks,
    InvalidArgument,
    InvariantError,
    LoRA,
)

from .contract import require_params
from .order import weight_order


class Node:
    """A cached beginning, and the lease on it while it is locked.

    found: what a lookup found; None for nothing, and for what a request has just cached: this is locked from the
    beginning and cannot be locked again after it was unlocked. A node of a pool that has been reset belongs to the old
    pool still.
    """

    __slots__ = ("_found", "_has_ended", "_lease", "_locks", "pool")

    def __init__(self, pool: BlockPool, found: FoundBlocks | None, lease: BlockLease | None = None) -> None:
        self.pool = pool
        self._found = found
        self._lease = lease
        self._locks = 0 if lease is None else 1
        self._has_ended = False

    @property
    def block_ids(self) -> npt.NDArray[np.int32]:
        """Return its blocks from the beginning, int32 (n,)."""
        if self._lease is not None:
            return self._lease.block_ids
        return np.zeros(0, np.int32) if self._found is None else self._found.block_ids

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def lease(self) -> BlockLease:
        """Return its lease. Raises `InvalidArgument` where it is not locked."""
        if self._lease is None:
            raise InvalidArgument("this node is not locked; its lock was released")
        return self._lease

    def lock(self) -> None:
        """Hold its blocks once more. The first lock counts as a hit. O(blocks).

        Raises `StaleBlocks` where one of them has been evicted since.
        """
        if self._lease is None:
            if self._has_ended:
                raise InvalidArgument("this node was unlocked by the request that cached it; match the prefix again")
            self._lease = self.pool.get_new_blocks(0) if self._found is None else self.pool.hold(self._found)
        self._locks += 1

    def unlock(self) -> None:
        """Give one lock back; the last frees the blocks. Raises `InvalidArgument` where there is none."""
        lease = self.lease
        self._locks -= 1
        if self._locks == 0:
            self._end()
            self.pool.free_blocks(lease)

    def take_lease(self) -> BlockLease:
        """One lock's hold on the blocks, which is the caller's now, and no lock any more."""
        lease = self.lease
        self._locks -= 1
        if self._locks > 0:
            return self.pool.touch(lease)
        self._end()
        return lease

    def _end(self) -> None:
        self._has_ended = self._found is None and len(self.block_ids) > 0
        self._lease = None


Tokens = npt.NDArray[np.int64]
Keys = tuple[LoRA | CacheSalt, ...]


class BlockPoolCache(BasePrefixCache):  # type: ignore[misc]
    """A `BasePrefixCache` of SGLang 0.5.23 for models without windows and states. params: its `CacheInitParams`.

    `pool` is the pool, in which a block is held exactly while a request has it locked. All sizes are in tokens.
    Raises `InvalidArgument` for what it does not serve.
    """

    def __init__(self, params: Any) -> None:
        require_params(params)
        self.disable = False
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.eviction_policy: str = params.eviction_policy
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self._offsets = np.arange(self.page_size, dtype=np.int64)
        if params.enable_metrics:
            self.init_metrics_collector()
        self.reset()

    def reset(self) -> None:
        """Forget all, in a new pool. What is locked stays locked in the old one, until it is unlocked."""
        num_pages = self.token_to_kv_pool_allocator.size // self.page_size
        self.pool = BlockPool(num_pages + 1, self.page_size, eviction_policy=self.eviction_policy)
        self.root_node = Node(self.pool, None)

    # Looking up.

    def match_prefix(self, params: Any) -> Any:
        """Return the cached pages that a key begins with, not held. O(pages).

        With "lru" they count as just used, as in SGLang, which matches waiting requests again and again; to other
        policies a match is nothing, and the first lock of it a hit.
        """
        node = self._find(params.key)
        self._touch(node)
        return MatchResult(
            device_prefix_len=len(node) * self.page_size,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
        )

    def touch_prefix(self, key: Any) -> None:
        """With "lru": the pages that a key begins with count as just used."""
        self._touch(self._find(key))

    def path_device_indices(self, node: Node) -> torch.Tensor:
        """Return the slots of all tokens of a node, int64 (n,), on the device."""
        return self._slots(node.block_ids)

    def dfs_weight_order(self, node_handles: Sequence[Node]) -> list[int]:
        """Return them depth first, the subtree of most requests first."""
        return weight_order([node.block_ids for node in node_handles])

    def _find(self, key: Any) -> Node:
        tokens = self._tokens(key)
        return Node(self.pool, self.pool.find_cached_blocks(tokens, extra_keys=_keys(key)) if len(tokens) > 0 else None)

    def _touch(self, node: Node) -> None:
        if self.eviction_policy == "lru" and len(node) > 0:
            node.lock()
            node.unlock()

    # Locks.

    def inc_lock_ref(self, node: Node) -> Any:
        """Hold what a node has. Raises `StaleBlocks` where something was evicted since it was matched."""
        before = self.evictable_size()
        node.lock()
        return IncLockRefResult(delta=self.evictable_size() - before)

    def dec_lock_ref(self, node: Node, params: Any = None) -> Any:
        """Give a lock back. Raises `InvalidArgument` where there is none."""
        before = self.evictable_size()
        node.unlock()
        return DecLockRefResult(delta=self.evictable_size() - before)

    # Caching.

    def insert(self, params: Any) -> Any:
        """Cache the pages of a key. Those of `value` that are cached already stay the caller's (`prefix_len`).

        Nothing of it is held afterwards. Raises `InvalidArgument` for slots that do not lie in pages of the allocator,
        and for a page that is cached or locked already; nothing has changed then.
        """
        tokens, keys = self._tokens(params.key), _keys(params.key)
        if params.value is None or len(params.value) < len(tokens):
            raise InvalidArgument(f"value has fewer slots than key has tokens, {len(tokens)}")
        if len(tokens) == 0:
            return InsertResult(prefix_len=0, last_device_node=Node(self.pool, None))
        found = self.pool.find_cached_blocks(tokens, extra_keys=keys)
        prefix_len = found.num_tokens
        fresh = self._fresh(params.value[prefix_len : len(tokens)])
        lease = self.pool.hold(found)
        try:
            self._append(lease, fresh, tokens, keys)
        finally:
            self.pool.free_blocks(lease)
        node = Node(self.pool, self.pool.find_cached_blocks(tokens, extra_keys=keys))
        return InsertResult(prefix_len=prefix_len, total_len=len(tokens), last_device_node=node)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Cache what a request has computed up to here, and lock all of it for the request. O(pages).

        What another request has cached in the meantime is taken from there: the request's own pages of it are freed.
        Raises `InvalidArgument` as `insert` does; nothing has changed then.
        """
        if req.kv.swa_evict_floor > 0:
            raise InvalidArgument(f"req {req.rid} has a window that was evicted; blockyard serves no windows")
        tokens = self._whole_pages(req.full_untruncated_fill_ids, up_to)
        held = req.lock.node
        if len(held) * self.page_size < len(tokens):
            req.lock = self._grown(req, held, tokens, _keys(req))
            req.last_node = req.lock.node
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(tokens))

    def _grown(self, req: Any, held: Node, tokens: Tokens, keys: Keys) -> Any:
        """Return the lock of a request that has computed `tokens`, in the place of its lock on `held`."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        first = len(held) * self.page_size
        found = self.pool.find_cached_blocks(tokens, extra_keys=keys)
        merged_len = found.num_tokens
        fresh = self._fresh(row[max(first, merged_len) : len(tokens)])
        lease = self._merged(held, found)
        try:
            self._append(lease, fresh, tokens, keys)
        except BaseException:
            self.pool.free_blocks(lease)
            req.lock = None
            raise
        if merged_len > first:
            self.token_to_kv_pool_allocator.free_segment(row[first:merged_len].clone(), start_pos=first)
            slots = self._slots(lease.block_ids[first // self.page_size : merged_len // self.page_size])
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(first, merged_len)), slots.to(row.dtype))
        req.kv.cache_protected_len = len(tokens)
        return TreeLock(Node(self.pool, None, lease), IncLockRefResult(delta=0).to_dec_params())

    def _merged(self, held: Node, found: FoundBlocks) -> BlockLease:
        """Return a lease in the place of one lock of `held`, on all that is cached of its request's tokens."""
        if len(found) <= len(held):
            return held.take_lease()
        if not np.array_equal(found.block_ids[: len(held)], held.block_ids):
            raise InvariantError("a request's locked pages are cached twice")
        lease = self.pool.hold(found)
        held.unlock()
        return lease

    def _fresh(self, slots: torch.Tensor) -> npt.NDArray[np.int64]:
        """The pages of these slots, which are to be cached. Raises `InvalidArgument` where one is cached or locked."""
        pages = self._pages(slots)
        # Adopted and freed, they are the next to be taken, in this order.
        self.pool.free_blocks(self.pool.adopt(pages, may_evict=False))
        return pages

    def _append(self, lease: BlockLease, pages: npt.NDArray[np.int64], tokens: Tokens, keys: Keys) -> None:
        """Let pages that are fresh stand behind a lease, and cache them."""
        first = len(lease)
        start = first * self.page_size
        if self.pool.extend(lease, len(pages)).tolist() != pages.tolist():
            raise InvariantError("the pool gives other pages than those that the allocator handed out")
        self.pool.cache_next_blocks(lease, tokens[start:], first, extra_keys=keys if start == 0 else ())

    # Eviction.

    def evict(self, params: Any) -> Any:
        """Free pages for `num_tokens` tokens, or all that are not locked, in the order of the policy. O(pages)."""
        started = time.perf_counter()
        count = min(-(-params.num_tokens // self.page_size), self._num_idle())
        if count <= 0:
            return EvictResult()
        slots = self._slots(self.pool.evict(count))
        self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        self.update_eviction_metrics(len(slots), started)
        return EvictResult(num_tokens_evicted=len(slots))

    def _num_idle(self) -> int:
        return self.pool.num_cached_blocks - self.pool.num_used_blocks

    # Sizes.

    def evictable_size(self) -> int:
        """Tokens that are cached and not locked. O(1)."""
        return self._num_idle() * self.page_size

    def protected_size(self) -> int:
        """Tokens that are cached and locked. O(1)."""
        return self.pool.num_used_blocks * self.page_size

    def total_size(self) -> int:
        """Tokens that are cached. O(1)."""
        return self.pool.num_cached_blocks * self.page_size

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of all cached tokens, in the order of their pages, int64. O(num_pages)."""
        return self._slots(np.nonzero(self.pool.cached_mask())[0])

    def pretty_print(self) -> None:
        """Print one line: how many tokens are cached, and how many of them locked."""
        print(f"blockyard: {self.total_size()} tokens cached, {self.protected_size()} locked")

    def sanity_check(self) -> None:
        """Raise `InvariantError` if anything is wrong, a page that is cached and free included. O(num_pages)."""
        self.pool.check()
        free = self.token_to_kv_pool_allocator.get_all_free_pages()
        if free is not None:
            both = np.nonzero(self.pool.cached_mask()[free.cpu().numpy()])[0]
            if len(both) > 0:
                raise InvariantError(f"page {int(free[int(both[0])])} is cached, and free in the allocator")

    # Keys, tokens, pages and slots.

    def _tokens(self, key: Any) -> Tokens:
        if key.is_bigram:
            raise InvalidArgument(f"{key!r} is a key of pairs of tokens; blockyard takes tokens")
        return self._whole_pages(key.token_ids, len(key))

    def _whole_pages(self, token_ids: Any, count: int) -> Tokens:
        """Return the first `count` tokens as far as they fill pages."""
        whole = min(count, len(token_ids)) // self.page_size * self.page_size
        # A copy: an array that is seen by another cannot grow.
        return np.array(token_ids[:whole], dtype=np.int64)

    def _pages(self, slots: torch.Tensor) -> npt.NDArray[np.int64]:
        """Return the pages of whole pages' slots, int64 (n,)."""
        starts = slots[:: self.page_size].to("cpu", torch.int64).numpy()
        if len(starts) > 0 and (starts % self.page_size).any():
            raise InvalidArgument(f"slots begin at {starts.tolist()[:3]}; pages have {self.page_size} slots")
        return starts // self.page_size

    def _slots(self, block_ids: npt.NDArray[Any]) -> torch.Tensor:
        """Return the slots of every token of blocks, in order, int64, on the device."""
        first = block_ids.astype(np.int64) * self.page_size
        return torch.from_numpy((first[:, None] + self._offsets).reshape(-1)).to(self.device)


def _keys(asked: Any) -> Keys:
    """What besides tokens a key or a request must share: SGLang's extra key (a LoRA adapter's id is in it) and salt."""
    keys: list[LoRA | CacheSalt] = []
    if asked.extra_key is not None:
        keys.append(LoRA(asked.extra_key))
    if asked.cache_salt:
        keys.append(CacheSalt(asked.cache_salt))
    return tuple(keys)
