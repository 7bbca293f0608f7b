"""Level "names": vLLM's `BlockPool` on `blockyard.named.NamedPool`, used by vLLM's own managers, for every model.

Blockyard decides which blocks are free, held, cached and evicted. vLLM's managers keep their tables of block objects,
and vLLM's hashes are the names. Events and hashing are inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU
from vllm.v1.core import block_pool as stock

from blockyard.named import NamedPool

from .objects import Block, EnginePool, HashToBlock

GROUP_BYTES = 4


class NamesToBlock(HashToBlock):
    """The map from hashes to blocks, which vLLM's code and tests also change."""

    _pool: BlockPool

    def contain(self, key: Any, block_id: int) -> bool:
        """Return whether the block has this hash."""
        more = self._pool.cached_block_hashes_by_block.get(block_id, ())
        return bool(self._pool.blocks[block_id].block_hash == key or key in more)

    def insert(self, key: Any, block: Any) -> None:
        """Add a hash to a held block."""
        self._pool.pool.name_one(block.block_id, key[:-GROUP_BYTES], group_of(key))

    def pop(self, key: Any, block_id: int) -> Any:
        """Remove a block's only hash and return the block, or None if it does not have that hash."""
        if not self.contain(key, block_id):
            return None
        if self._pool.cached_block_hashes_by_block.get(block_id):
            raise NotImplementedError(f"block {block_id} has several hashes, which can only be removed together")
        self._pool.pool.uncache([block_id])
        return self._pool.blocks[block_id]


@cache
def group_number(suffix: bytes) -> int:
    """Return the group's number, which vLLM appends to the hash."""
    return int.from_bytes(suffix, "big")


def group_of(key: bytes) -> int:
    """Return the group's number in a key."""
    return group_number(key[-GROUP_BYTES:])


class BlockPool(EnginePool, stock.BlockPool):
    """vLLM's block pool. A subclass, made for each scheduler, sets the policy and `misses`."""

    eviction_policy: Any = "lru"

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: Any = None,
        *,
        num_hash_lookahead_tokens: int = 0,
        medium: str = MEDIUM_GPU,
    ) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.medium = medium
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.num_hash_lookahead_tokens = num_hash_lookahead_tokens
        self.blocks: list[Any] = [Block(self, block_id) for block_id in range(num_gpu_blocks)]
        #: A block's names besides its first one.
        self.cached_block_hashes_by_block: dict[int, set[Any]] = {}
        self._reuse_watchers: dict[int, Callable[[Any], None]] = {}
        pool = NamedPool(num_gpu_blocks, eviction_policy=self.eviction_policy)
        super().__init__(pool, enable_kv_cache_events, metrics_collector)
        self.cached_block_hash_to_block = NamesToBlock(self)

    def block(self, block_id: int) -> Any:
        return self.blocks[block_id]

    def find(self, key: Any) -> int:
        return int(self.pool.find_one(key[:-GROUP_BYTES], group_of(key)))

    def cached_keys(self) -> Iterator[tuple[Any, int]]:
        for block_id in range(1, self.num_gpu_blocks):
            for name, group in self.pool.names_of(block_id):
                yield name + group.to_bytes(GROUP_BYTES, "big"), block_id

    def set_count(self, block_id: int, value: int) -> None:
        if block_id == 0:
            self.null_count = value
            return
        more = value - self.counts[block_id]
        if more > 0:
            self.pool.hold_ids([block_id] * more)
        elif more < 0:
            self.pool.free_ids([block_id] * -more)

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None:
        """Return the block with this hash in each group, or None if one of them lacks it."""
        find_one, blocks = self.pool.find_one, self.blocks
        if len(kv_cache_group_ids) == 1:
            block_id = find_one(block_hash, kv_cache_group_ids[0])
            return [blocks[block_id]] if block_id else None
        found = []
        for group in kv_cache_group_ids:
            block_id = find_one(block_hash, group)
            if not block_id:
                return None
            found.append(blocks[block_id])
        return found

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        """Return blocks from the head of the free queue, evicting their contents."""
        if num_blocks > self.pool.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks, names = self.blocks, self.names
        taken = [blocks[block_id] for block_id in self.pool.new_ids(num_blocks)]
        if self._reuse_watchers:
            self._notify_reuse(taken)
        if self.enable_caching:
            for block in taken:
                if self.metrics_collector:
                    self.metrics_collector.on_block_evicted(block)
                if block.block_id in names:
                    self._emit_block_removed_events(self._forget_hashes(block))
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        return taken

    def _forget_hashes(self, block: Any) -> list[Any]:
        """Return a block's hashes after the pool below has forgotten them."""
        hashes = [self.names.pop(block.block_id)[0]]
        if self.cached_block_hashes_by_block:
            hashes += self.cached_block_hashes_by_block.pop(block.block_id, ())
        if self.misses is not None:
            for key in hashes:
                self.misses.note_removed(key[:-GROUP_BYTES])
        return hashes

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        """Remove and return all hashes of a block."""
        if block.block_id not in self.names:
            return []
        self.pool.uncache([block.block_id])
        return self._forget_hashes(block)

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None) -> None:
        """Add a hash to a held block."""
        key, block_id = block_hash_with_group_id, block.block_id
        first = self.names.get(block_id)
        if first is not None and (first[0] == key or key in self.cached_block_hashes_by_block.get(block_id, ())):
            return
        self.pool.name_one(block_id, key[:-GROUP_BYTES], group_number(key[-GROUP_BYTES:]))
        if first is None:
            self.names[block_id] = (key, num_tokens)
        else:
            self.cached_block_hashes_by_block.setdefault(block_id, set()).add(key)
        if self.misses is not None:
            self.misses.note_cached(key[:-GROUP_BYTES])

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold hits, and blocks that connectors pin."""
        ids = []
        for block in blocks:
            if block.is_null:
                self.null_count += 1
            else:
                ids.append(block.block_id)
        self.pool.hold_ids(ids)
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Free blocks; the first is evicted first. Blocks of other pools are passed on to them."""
        ids = []
        others: dict[Any, list[Any]] = {}
        for block in ordered_blocks:
            if block.pool is not self:
                others.setdefault(block.pool, []).append(block)
            elif block.is_null:
                self.null_count -= 1
            else:
                ids.append(block.block_id)
        # A block without a pool was made elsewhere and counts its own holders.
        for block in others.pop(None, ()):
            block.ref_cnt -= 1
        self.pool.free_ids(ids)
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        """Free blocks that stay readable until they are reused, and make them the last to be reused."""
        released = list(blocks)
        assert all(block.ref_cnt > 0 and not block.is_null for block in released)
        for block in released:
            self._reuse_watchers[block.block_id] = on_reuse
        self.pool.free_ids([block.block_id for block in released], last=True)

    def forget_names(self) -> None:
        """Clear all names, and notify those that wait for blocks to be reused."""
        self.cached_block_hashes_by_block.clear()
        if self._reuse_watchers:
            self._notify_reuse([self.blocks[block_id] for block_id in list(self._reuse_watchers)])
        super().forget_names()
