"""Level "names": vLLM's `BlockPool` on `blockyard.named.NamedPool`, below vLLM's own managers, for every kind of model.

Who is free, who is held, who is evicted and what is cached is Blockyard's; vLLM's managers keep their tables of block
objects, and its hashes are the names. Events and hashing are inherited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared
from vllm.logger import init_logger
from vllm.v1.core import block_pool as stock

from ...named import NamedPool
from .misses import MissCauses

# Below the one logger that vLLM gives handlers to.
logger = init_logger(f"vllm.{__name__}")
GROUP_BYTES = 4


class Block:
    """vLLM's KVCacheBlock; its count and its place in the free queue are the pool's."""

    __slots__ = ("_block_hash", "_block_hash_num_tokens", "_counts", "_null_count", "block_id", "is_null", "pool")

    def __init__(self, block_id: int, pool: BlockPool) -> None:
        self.block_id = block_id
        self.pool = pool
        self.is_null = block_id == 0
        self._counts = pool.counts
        self._null_count = 0
        self._block_hash: Any = None
        self._block_hash_num_tokens: int | None = None

    @property
    def ref_cnt(self) -> int:
        """How often it is held. The null block's is vLLM's own affair."""
        return self._null_count if self.is_null else self._counts[self.block_id]

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        """vLLM's managers count up by themselves (`cow_block.ref_cnt += 1`)."""
        if self.is_null:
            self._null_count = value
            return
        more = value - self._counts[self.block_id]
        if more > 0:
            self.pool.named.hold_ids([self.block_id] * more)
        elif more < 0:
            self.pool.named.free_ids([self.block_id] * -more)

    @property
    def block_hash(self) -> Any:
        """Its first name, the hash with the group's number behind; None where it is not cached."""
        return self._block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """How many tokens of a prompt that name stands for."""
        return self._block_hash_num_tokens

    def set_block_hash(self, block_hash: Any, num_tokens: int | None = None) -> None:
        """Note its first name."""
        assert self._block_hash is None, "The block already has a hash. This should not happen."
        self._block_hash = block_hash
        self._block_hash_num_tokens = num_tokens

    def reset_hash(self) -> None:
        """It has no name any more."""
        self._block_hash = None
        self._block_hash_num_tokens = None

    @property
    def next_free_block(self) -> Any:
        """The block that is allocated after it; None for a block that is held."""
        return self.pool.free_block_queue.after(self)

    @property
    def prev_free_block(self) -> Any:
        """The block that is allocated before it; None for a block that is held."""
        return self.pool.free_block_queue.before(self)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            getattr(other, "block_id", None) == self.block_id
            and getattr(other, "ref_cnt", None) == self.ref_cnt
            and getattr(other, "_block_hash", 0) == self._block_hash
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self._block_hash!r})"


class End:
    """An end of the free queue, which vLLM has as a block of id -1."""

    block_id = -1

    def __init__(self, queue: FreeQueue, is_head: bool) -> None:
        self._queue = queue
        self._is_head = is_head

    @property
    def next_free_block(self) -> Any:
        """The first free block, of the head."""
        return self._queue.block_or_end(self._queue.named.free_block_after(0), True) if self._is_head else None

    @property
    def prev_free_block(self) -> Any:
        """The last free block, of the tail."""
        return None if self._is_head else self._queue.block_or_end(self._queue.named.free_block_before(0), False)


class FreeQueue:
    """What vLLM's connectors ask of its free queue."""

    def __init__(self, named: NamedPool, blocks: Sequence[Any]) -> None:
        self.named = named
        self._blocks = blocks
        self.fake_free_list_head = End(self, True)
        self.fake_free_list_tail = End(self, False)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return self.named.num_free_blocks

    def block_or_end(self, block_id: int, ahead: bool) -> Any:
        """A block, or the end of the queue where there is none."""
        if block_id:
            return self._blocks[block_id]
        return self.fake_free_list_tail if ahead else self.fake_free_list_head

    def after(self, block: Any) -> Any:
        """See `Block.next_free_block`."""
        if block.is_null or block.ref_cnt:
            return None
        return self.block_or_end(self.named.free_block_after(block.block_id), True)

    def before(self, block: Any) -> Any:
        """See `Block.prev_free_block`."""
        if block.is_null or block.ref_cnt:
            return None
        return self.block_or_end(self.named.free_block_before(block.block_id), False)

    def get_all_free_blocks(self) -> list[Any]:
        """In the order in which they will be allocated."""
        return [self._blocks[block_id] for block_id in self.named.free_block_ids().tolist()]

    def iter_blocks_after(self, block: Any) -> Iterator[Any]:
        """The free blocks behind one of them; all of them for None."""
        block_id = self.named.free_block_after(0 if block is None else block.block_id)
        while block_id:
            yield self._blocks[block_id]
            block_id = self.named.free_block_after(block_id)


class HashToBlock:
    """vLLM's map from hashes to blocks, as questions to the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def get_one_block(self, key: Any) -> Any:
        """The block that has had this hash (with its group) the longest, or None."""
        found = self._pool.named.find_one(key[:-GROUP_BYTES], group_of(key))
        return self._pool.blocks[found] if found else None

    def contain(self, key: Any, block_id: int) -> bool:
        """Whether this block has this hash."""
        more = self._pool.cached_block_hashes_by_block.get(block_id, ())
        return bool(self._pool.blocks[block_id]._block_hash == key or key in more)

    def insert(self, key: Any, block: Any) -> None:
        """Give a block that is held one more hash."""
        self._pool.named.name_one(block.block_id, key[:-GROUP_BYTES], group_of(key))

    def pop(self, key: Any, block_id: int) -> Any:
        """Take a hash, its only one, from a block; None where it has not got it."""
        if not self.contain(key, block_id):
            return None
        if self._pool.cached_block_hashes_by_block.get(block_id):
            raise NotImplementedError(f"block {block_id} has several hashes, which go together")
        self._pool.named.uncache([block_id])
        return self._pool.blocks[block_id]

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def _cache(self) -> dict[Any, Any]:
        """The map as vLLM has it, for its tests. O(blocks)."""
        found: dict[Any, dict[int, Any]] = {}
        for block in self._pool.blocks[1:]:
            for name, group in self._pool.named.names_of(block.block_id):
                found.setdefault(name + group.to_bytes(GROUP_BYTES, "big"), {})[block.block_id] = block
        return {key: next(iter(blocks.values())) if len(blocks) == 1 else blocks for key, blocks in found.items()}


@cache
def group_number(suffix: bytes) -> int:
    """The group's number, which vLLM writes behind the hash."""
    return int.from_bytes(suffix, "big")


def group_of(key: bytes) -> int:
    """The number of the group of a key."""
    return group_number(key[-GROUP_BYTES:])


class BlockPool(stock.BlockPool):
    """vLLM's interface. `named` is the pool below; a subclass, made for one scheduler, sets the policy and `misses`."""

    eviction_policy: Any = "lru"
    misses: MissCauses | None = None

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
        self.named = NamedPool(num_gpu_blocks, eviction_policy=self.eviction_policy)
        self.counts = self.named.ref_counts().data
        self.blocks: list[Any] = [Block(block_id, self) for block_id in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue: Any = FreeQueue(self.named, self.blocks)
        self.cached_block_hash_to_block: Any = HashToBlock(self)
        self.cached_block_hashes_by_block: dict[int, set[Any]] = {}
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[Any] = []
        self.metrics_collector = metrics_collector
        self._reuse_watchers: dict[int, Callable[[Any], None]] = {}

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None:
        """The block of this hash in each group; None where one lacks it."""
        find_one, blocks = self.named.find_one, self.blocks
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
        """Blocks from the head of the free queue. What they cached is evicted."""
        if num_blocks > self.named.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = self.blocks
        taken = [blocks[block_id] for block_id in self.named.new_ids(num_blocks)]
        if self._reuse_watchers:
            self._notify_reuse(taken)
        if self.enable_caching:
            for block in taken:
                if self.metrics_collector:
                    self.metrics_collector.on_block_evicted(block)
                if block._block_hash is not None:
                    self._emit_block_removed_events(self._forget_hashes(block))
        if self.metrics_collector:
            for block in taken:
                self.metrics_collector.on_block_allocated(block)
        return taken

    def _forget_hashes(self, block: Any) -> list[Any]:
        """The hashes of a block, which the pool below has forgotten already."""
        hashes = [block._block_hash]
        if self.cached_block_hashes_by_block:
            hashes += self.cached_block_hashes_by_block.pop(block.block_id, ())
        block._block_hash = block._block_hash_num_tokens = None
        if self.misses is not None:
            for key in hashes:
                self.misses.went(key[:-GROUP_BYTES])
        return hashes

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        """All hashes of a block, which has none then."""
        if block._block_hash is None:
            return []
        self.named.uncache([block.block_id])
        return self._forget_hashes(block)

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None) -> None:
        """Give a block that is held one hash more."""
        key = block_hash_with_group_id
        more = self.cached_block_hashes_by_block.get(block.block_id, ())
        if block._block_hash == key or key in more:
            return
        self.named.name_one(block.block_id, key[:-GROUP_BYTES], group_number(key[-GROUP_BYTES:]))
        if block._block_hash is None:
            block._block_hash, block._block_hash_num_tokens = key, num_tokens
        else:
            self.cached_block_hashes_by_block.setdefault(block.block_id, set()).add(key)
        if self.misses is not None:
            self.misses.came(key[:-GROUP_BYTES])

    def touch(self, blocks: Sequence[Any]) -> None:
        """Hold blocks once more: hits, and what connectors pin."""
        ids = []
        for block in blocks:
            if block.is_null:
                block._null_count += 1
            else:
                ids.append(block.block_id)
        self.named.hold_ids(ids)
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Let go of blocks, the first to be evicted first; those of other pools go there."""
        ids = []
        others: dict[Any, list[Any]] = {}
        for block in ordered_blocks:
            if block.pool is not self:
                others.setdefault(block.pool, []).append(block)
            elif block.is_null:
                block._null_count -= 1
            else:
                ids.append(block.block_id)
        # A block of no pool was made elsewhere and counts for itself.
        for block in others.pop(None, ()):
            block.ref_cnt -= 1
        self.named.free_ids(ids)
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        """Let go of blocks that stay readable until they are handed out: they are the last to be."""
        released = list(blocks)
        assert all(block.ref_cnt > 0 and not block.is_null for block in released)
        for block in released:
            self._reuse_watchers[block.block_id] = on_reuse
        self.named.free_ids([block.block_id for block in released], last=True)

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing happens, while blocks are held."""
        if self.named.num_used_blocks:
            logger.warning(
                "Failed to reset prefix cache because some blocks (%d) are not freed yet", self.named.num_used_blocks
            )
            return False
        self.named.reset_prefix_cache()
        if self.misses is not None:
            self.misses.were_reset()
        self.cached_block_hashes_by_block.clear()
        if self._reuse_watchers:
            self._notify_reuse([self.blocks[block_id] for block_id in list(self._reuse_watchers)])
        for block in self.blocks:
            block.reset_hash()
        if self.metrics_collector:
            self.metrics_collector.reset()
        logger.info("Successfully reset prefix cache")
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def get_num_free_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return self.named.num_free_blocks
