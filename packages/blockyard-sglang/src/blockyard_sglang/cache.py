"""SGLang's prefix cache on a `BlockPool`. Its scheduler, allocator and kernels stay unchanged.

A page of SGLang is a block with the same number; slot 0 is padding there, and block 0 of a pool is the null block. The
allocator hands out pages and takes them back, while the pool holds the cached ones and chooses which to evict. Blocks
are compared by tokens, extra key and salt. As in SGLang's own cache, equal pages are merged: the request's own pages
are freed, and its row points at the cached ones. A match is a `Node` that SGLang's scheduler can lock, like a node of
its tree.
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
    """A cached prefix, with a lease while it is locked.

    A node belongs to the pool it was made from, even after a reset.

    Args:
        pool: the pool.
        found: result of a lookup. None for an empty prefix, and for one that a request has just cached: that one is
            locked from the start and cannot be locked again after its last unlock.
        lease: the lease of a locked node.
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
        """The prefix's blocks from the start, int32 (n,)."""
        if self._lease is not None:
            return self._lease.block_ids
        return np.zeros(0, np.int32) if self._found is None else self._found.block_ids

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def lease(self) -> BlockLease:
        """The lease. Raises `InvalidArgument` unless the node is locked."""
        if self._lease is None:
            raise InvalidArgument("this node is not locked; lock it before you unlock it or read its lease")
        return self._lease

    def lock(self) -> None:
        """Hold the blocks once more. The first lock counts as a hit. O(blocks).

        Raises:
            StaleBlocks: if one of them was evicted since the lookup.
        """
        if self._lease is None:
            if self._has_ended:
                raise InvalidArgument("the request that cached this node has unlocked it; match the prefix again")
            self._lease = self.pool.get_new_blocks(0) if self._found is None else self.pool.hold(self._found)
        self._locks += 1

    def unlock(self) -> None:
        """Release one lock; the last one frees the blocks.

        Raises:
            InvalidArgument: if the node is not locked.
        """
        lease = self.lease
        self._locks -= 1
        if self._locks == 0:
            self._end()
            self.pool.free_blocks(lease)

    def take_lease(self) -> BlockLease:
        """Turn one lock into a lease that the caller owns."""
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
    """SGLang 0.5.23's `BasePrefixCache` for models without windows and states.

    A block is held in `pool` exactly while a request has it locked. Sizes are in tokens.

    Args:
        params: SGLang's `CacheInitParams`.

    Raises:
        InvalidArgument: for unsupported parameters.
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
        """Start with a new, empty pool. Locked blocks stay locked in the old one."""
        num_pages = self.token_to_kv_pool_allocator.size // self.page_size
        self.pool = BlockPool(num_pages + 1, self.page_size, eviction_policy=self.eviction_policy)
        self.root_node = Node(self.pool, None)

    # Looking up.

    def match_prefix(self, params: Any) -> Any:
        """Return the cached pages that a key starts with, without holding them. O(pages).

        With "lru" they count as just used, as in SGLang, which matches waiting requests repeatedly. Other policies
        ignore a match and count the first lock as a hit.
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
        """With "lru", mark the pages that a key starts with as just used."""
        self._touch(self._find(key))

    def path_device_indices(self, node: Node) -> torch.Tensor:
        """Return the slots of all tokens of a node, int64 (n,), on the device."""
        return self._slots(node.block_ids)

    def dfs_weight_order(self, node_handles: Sequence[Node]) -> list[int]:
        """Return the nodes' indices depth first, the subtree with most requests first."""
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
        """Lock a node.

        Raises:
            StaleBlocks: if one of its blocks was evicted since the match.
        """
        before = self.evictable_size()
        node.lock()
        return IncLockRefResult(delta=self.evictable_size() - before)

    def dec_lock_ref(self, node: Node, params: Any = None) -> Any:
        """Unlock a node.

        Raises:
            InvalidArgument: if it is not locked.
        """
        before = self.evictable_size()
        node.unlock()
        return DecLockRefResult(delta=self.evictable_size() - before)

    # Caching.

    def insert(self, params: Any) -> Any:
        """Cache the pages of a key without holding them.

        Pages of the first `prefix_len` tokens of the result were cached already; the caller frees its own copies of
        them.

        Raises:
            InvalidArgument: for slots that are not whole pages, or a page that is already cached or locked. Nothing
                changes.
        """
        tokens, keys = self._tokens(params.key), _keys(params.key)
        if params.value is None or len(params.value) < len(tokens):
            num_slots = 0 if params.value is None else len(params.value)
            raise InvalidArgument(f"value has {num_slots} slots; key has {len(tokens)} tokens, and each needs one")
        if len(tokens) == 0:
            return InsertResult(prefix_len=0, last_device_node=Node(self.pool, None))
        found = self.pool.find_cached_blocks(tokens, extra_keys=keys)
        prefix_len = found.num_tokens
        pages = self._prepare(params.value[prefix_len : len(tokens)])
        lease = self.pool.hold(found)
        try:
            self._append(lease, pages, tokens, keys)
        finally:
            self.pool.free_blocks(lease)
        node = Node(self.pool, self.pool.find_cached_blocks(tokens, extra_keys=keys))
        return InsertResult(prefix_len=prefix_len, total_len=len(tokens), last_device_node=node)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Cache a request's computed pages up to here, and lock all of them for the request. O(pages).

        Pages that another request cached in the meantime are used instead of the request's own, which are freed.

        Raises:
            InvalidArgument: as `insert` does. Nothing changes.
        """
        if req.kv.swa_evict_floor > 0:
            raise InvalidArgument(f"req {req.rid} has an evicted window; blockyard does not support sliding windows")
        tokens = self._whole_pages(req.full_untruncated_fill_ids, up_to)
        held = req.lock.node
        if len(held) * self.page_size < len(tokens):
            req.lock = self._extend_lock(req, held, tokens, _keys(req))
            req.last_node = req.lock.node
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, len(tokens))

    def _extend_lock(self, req: Any, held: Node, tokens: Tokens, keys: Keys) -> Any:
        """Return a lock on all of `tokens`, to replace the request's lock on `held`."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        first = len(held) * self.page_size
        found = self.pool.find_cached_blocks(tokens, extra_keys=keys)
        merged_len = found.num_tokens
        pages = self._prepare(row[max(first, merged_len) : len(tokens)])
        if len(found) <= len(held):
            lease = held.take_lease()
        elif not np.array_equal(found.block_ids[: len(held)], held.block_ids):
            raise InvariantError("a request's locked pages are cached twice")
        else:
            lease = self.pool.hold(found)
            held.unlock()
        try:
            self._append(lease, pages, tokens, keys)
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

    def _prepare(self, slots: torch.Tensor) -> npt.NDArray[np.int64]:
        """Return the pages of slots to be cached. Raises `InvalidArgument` if one is cached or locked."""
        starts = slots[:: self.page_size].to("cpu", torch.int64).numpy()
        if len(starts) > 0 and (starts % self.page_size).any():
            raise InvalidArgument(f"slots begin at {starts.tolist()[:3]}; they must be multiples of {self.page_size}")
        pages = starts // self.page_size
        # Adopted and freed, these pages are the next ones to be taken, in this order.
        self.pool.free_blocks(self.pool.adopt(pages, may_evict=False))
        return pages

    def _append(self, lease: BlockLease, pages: npt.NDArray[np.int64], tokens: Tokens, keys: Keys) -> None:
        """Append prepared pages to a lease and cache them."""
        first = len(lease)
        start = first * self.page_size
        if self.pool.extend(lease, len(pages)).tolist() != pages.tolist():
            raise InvariantError("the pool returned other pages than the allocator handed out")
        self.pool.cache_next_blocks(lease, tokens[start:], first, extra_keys=keys if start == 0 else ())

    # Eviction.

    def evict(self, params: Any) -> Any:
        """Free pages for `num_tokens` tokens, or all unlocked ones, in the policy's order. O(pages)."""
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
        """Return the cached and unlocked tokens. O(1)."""
        return self._num_idle() * self.page_size

    def protected_size(self) -> int:
        """Return the cached and locked tokens. O(1)."""
        return self.pool.num_used_blocks * self.page_size

    def total_size(self) -> int:
        """Return the cached tokens. O(1)."""
        return self.pool.num_cached_blocks * self.page_size

    def all_values_flatten(self) -> torch.Tensor:
        """Return the slots of all cached tokens in page order, int64. O(num_pages)."""
        return self._slots(np.nonzero(self.pool.cached_mask())[0])

    def pretty_print(self) -> None:
        """Print how many tokens are cached and locked."""
        print(f"blockyard: {self.total_size()} tokens cached, {self.protected_size()} locked")

    def sanity_check(self) -> None:
        """Raise `InvariantError` if the cache is inconsistent, or a page is both cached and free. O(num_pages)."""
        self.pool.check()
        free = self.token_to_kv_pool_allocator.get_all_free_pages()
        if free is not None:
            both = np.nonzero(self.pool.cached_mask()[free.cpu().numpy()])[0]
            if len(both) > 0:
                raise InvariantError(f"page {int(free[int(both[0])])} is both cached and free in the allocator")

    # Keys, tokens, pages and slots.

    def _tokens(self, key: Any) -> Tokens:
        if key.is_bigram:
            raise InvalidArgument(f"key is {key!r}, of token pairs; blockyard supports keys of single tokens")
        return self._whole_pages(key.token_ids, len(key))

    def _whole_pages(self, token_ids: Any, count: int) -> Tokens:
        """Return the first `count` tokens as far as they fill pages."""
        whole = min(count, len(token_ids)) // self.page_size * self.page_size
        # A copy, because an array with a view on it cannot grow.
        return np.array(token_ids[:whole], dtype=np.int64)

    def _slots(self, block_ids: npt.NDArray[Any]) -> torch.Tensor:
        """Return the slots of every token of these blocks, int64, on the device."""
        first = block_ids.astype(np.int64) * self.page_size
        return torch.from_numpy((first[:, None] + self._offsets).reshape(-1)).to(self.device)


def _keys(source: Any) -> Keys:
    """Return the keys to share besides tokens: SGLang's extra key (includes the adapter's id) and salt."""
    keys: list[LoRA | CacheSalt] = []
    if source.extra_key is not None:
        keys.append(LoRA(source.extra_key))
    if source.cache_salt:
        keys.append(CacheSalt(source.cache_salt))
    return tuple(keys)
