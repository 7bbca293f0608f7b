"""transformers' continuous batching (`generate_batch`) on a `BlockPool`.

    from blockyard.integrations.transformers import pooled_cache

    with pooled_cache(eviction_policy="lru") as pools:
        outputs = model.generate_batch(inputs, generation_config=..., continuous_batching_config=...)

transformers has no place for another block manager, so two classes of its cache are exchanged while the context lasts;
caches that are made in it keep them. Written for transformers 5.19, for models of which all layers attend to all
tokens. What changes: a hit is compared token by token (transformers trusts 8 bytes of a hash), and cached blocks go one
by one, in the order of a policy (transformers drops all of them at once). Equal blocks of two requests stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .. import BlockLease, BlockPool, FoundBlocks, InvalidArgument, MissingExtra

try:
    import torch
    from transformers.generation.continuous_batching import cache as _cache
    from transformers.generation.continuous_batching.cache_allocators import (
        FULL_ATTENTION,
        CachePool,
        FullAttentionCacheAllocator,
    )
except ImportError as error:
    raise MissingExtra(
        f"blockyard.integrations.transformers needs torch and transformers 5.19: pip install 'blockyard[engine]' "
        f"({error})"
    ) from error


class PooledSectors(CachePool):  # type: ignore[misc]  # untyped
    """What transformers asks for free memory: all sectors belong to one allocator, whose pool counts its blocks."""

    blocks: BlockPool

    def __init__(self, num_sectors: int, num_allocators: int, num_reserved_sectors: int = 2) -> None:
        if num_allocators != 1:
            raise InvalidArgument(
                f"the model has layers of {num_allocators} kinds; pooled_cache serves models of which all layers "
                f"attend to all tokens"
            )
        super().__init__(num_sectors, num_allocators, num_reserved_sectors)

    def reset(self) -> None:
        """All sectors are given to the allocator, and stay there."""
        self.free_sectors: list[int] = []

    def set_blocks_per_sector(self, index: int, blocks_per_sector: int) -> None:
        """Kept to number blocks as transformers does."""
        self.blocks_per_sector[index] = blocks_per_sector

    def try_to_free_sectors(self) -> None:
        """Nothing: there is no other allocator to take them."""

    def free_blocks(self, index: int, block_ids: list[int]) -> None:
        """Nothing: blocks are freed with their leases."""

    def count_free_blocks(self, index: int) -> int:  # transformers calls it so
        """Blocks that a request can be given: empty ones, and cached ones that nobody holds."""
        return self.blocks.num_free_blocks


class PooledAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]  # untyped
    """A full-attention allocator whose blocks come from a `BlockPool`, by one lease for each request.

    `blocks` is the pool. Block tables have its ids, moved behind the two sectors that transformers keeps to itself.
    """

    pool_options: dict[str, Any]
    pools: list[BlockPool]

    def _after_cache_tensor_init(
        self, non_trash_bytes: int, bytes_per_sector: int, cache_tensor: torch.Tensor, pool: PooledSectors
    ) -> None:
        super()._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        options = {"enable_prefix_caching": self.use_block_sharing, **self.pool_options}
        self.blocks = pool.blocks = BlockPool(self.num_blocks + 1, self.tokens_per_page, **options)
        self._moved_by = pool.num_reserved_sectors * self.blocks_per_sector - 1
        self._leases: dict[str, BlockLease] = {}
        self._found: FoundBlocks | None = None
        self.ledger = _Ledger(self.blocks)
        self.pools.append(self.blocks)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Give a request blocks for its new tokens. Raises `OutOfBlocks` if there are not enough."""
        self._extend(request_id, self.needs_new_blocks(request_id, past_length, query_length))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:  # likewise
        """End a request's lease. no_cache has no effect: what is cached can be taken as well as what is empty."""
        self.block_table.pop(request_id, None)
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.blocks.free_blocks(lease)

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """The cached blocks that a prompt begins with, its last token left to be computed."""
        found = self.blocks.find_cached_blocks(prompt_ids)
        self._found = found.first(min(len(found), (len(prompt_ids) - 1) // self.tokens_per_page))
        return self._numbered(self._found.block_ids)

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Hold the first of what was found last. Raises `StaleBlocks` if they are no longer there."""
        if self._found is None or self._numbered(self._found.block_ids) != block_ids:
            raise InvalidArgument(f"block_ids has {len(block_ids)} blocks that match_prefix_blocks did not find")
        lease = self.blocks.hold(self._found, request_id, num_blocks=prefix_len // self.tokens_per_page)
        self._begin(request_id, lease)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Cache the blocks that the forward pass filled. O(new tokens)."""
        lease = self._leases[request_id]
        start = lease.num_cached_blocks * self.tokens_per_page
        filled = (len(token_ids) - start) // self.tokens_per_page
        end = start + min(new_new_blocks, filled) * self.tokens_per_page
        self.blocks.cache_next_blocks(lease, token_ids[start:end])

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Share full blocks with another request; returns what must be copied, from and to."""
        source = self._leases[source_request_id]
        num_shared = self.count_shareable_blocks(source_request_id, past_length)
        copied = self._numbered(source.block_ids[num_shared:])
        self._begin(dest_request_id, self.blocks.touch(source, dest_request_id, stop=num_shared))
        try:
            self._extend(dest_request_id, len(copied))
        except BaseException:
            self.free_blocks(dest_request_id)
            raise
        return copied, self.block_table[dest_request_id][num_shared:]

    def _begin(self, request_id: str, lease: BlockLease) -> None:
        self._leases[request_id] = lease
        self.block_table[request_id] = self._numbered(lease.block_ids)

    def _extend(self, request_id: str, num_blocks: int) -> None:
        lease = self._leases.get(request_id)
        if lease is None:
            self._begin(request_id, self.blocks.get_new_blocks(num_blocks, request_id))
        else:
            self.block_table[request_id] += self._numbered(self.blocks.extend(lease, num_blocks))

    def _numbered(self, block_ids: np.ndarray) -> list[int]:
        """As transformers numbers them."""
        return [block + self._moved_by for block in block_ids.tolist()]


class _Ledger:
    """What transformers' cache asks of its own ledger of cached blocks."""

    def __init__(self, blocks: BlockPool) -> None:
        self._blocks = blocks

    def reset(self) -> None:
        self._blocks.reset_prefix_cache()

    def evict_cached_blocks(self) -> Sequence[int]:
        """None: the pool takes them when it needs them, one by one, and counts them as free."""
        return []


@contextmanager
def pooled_cache(**pool_options: Any) -> Iterator[list[BlockPool]]:
    """Caches of continuous batching that are made meanwhile keep their blocks in a `BlockPool`; yields these pools.

    pool_options: of `BlockPool`: eviction_policy, retention_blocks, history_size and so on. A model with layers of
    other kinds raises `InvalidArgument` when its cache is made. Not for use by several threads at once.
    """
    pools: list[BlockPool] = []
    allocator = type("PooledAllocator", (PooledAllocator,), {"pool_options": pool_options, "pools": pools})
    own_allocators, own_pool = _cache.ATTN_TYPE_TO_ALLOCATOR, _cache.CachePool
    _cache.ATTN_TYPE_TO_ALLOCATOR = {**own_allocators, FULL_ATTENTION: allocator}
    _cache.CachePool = PooledSectors
    try:
        yield pools
    finally:
        _cache.ATTN_TYPE_TO_ALLOCATOR, _cache.CachePool = own_allocators, own_pool
