"""vLLM's block, free queue and hash map, as views of a Blockyard pool; shared by both levels.

They hold no state. Each asks the `EnginePool` of its level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.logger import init_logger

from blockyard import BlockLease

from .misses import StepMisses

# A child of vLLM's logger, so that its handlers apply.
logger = init_logger(f"vllm.{__name__}")


class Block:
    """A block as vLLM's code sees it.

    Attributes:
        lease: the lease it was taken from, to free it by; None otherwise.
        position: its position in the lease.
    """

    __slots__ = ("block_id", "is_null", "lease", "pool", "position")

    def __init__(self, pool: EnginePool, block_id: int, lease: BlockLease | None = None, position: int = 0) -> None:
        self.pool = pool
        self.block_id = block_id
        self.is_null = block_id == 0
        self.lease = lease
        self.position = position

    @property
    def ref_cnt(self) -> int:
        """Number of holders. The null block's count is vLLM's own."""
        return self.pool.null_count if self.is_null else self.pool.counts[self.block_id]

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        """vLLM's managers count up by themselves (`cow_block.ref_cnt += 1`)."""
        self.pool.set_count(self.block_id, value)

    @property
    def block_hash(self) -> Any:
        """First name: the hash with the group's number appended; None if the block caches nothing."""
        name = self.pool.names.get(self.block_id)
        return None if name is None else name[0]

    _block_hash = block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Number of prompt tokens that the first name covers."""
        name = self.pool.names.get(self.block_id)
        return None if name is None else name[1]

    def set_block_hash(self, block_hash: Any, num_tokens: int | None = None) -> None:
        """Record the first name."""
        assert self.block_hash is None, "The block already has a hash. This should not happen."
        self.pool.names[self.block_id] = (block_hash, num_tokens)

    @property
    def next_free_block(self) -> Any:
        """Block that is allocated next; None for a held block."""
        return self.pool.free_block_queue.after(self)

    @property
    def prev_free_block(self) -> Any:
        """Block that is allocated before; None for a held block."""
        return self.pool.free_block_queue.before(self)

    def __eq__(self, other: object) -> bool:
        return self is other or getattr(other, "block_id", None) == self.block_id

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class QueueEnd:
    """Head or tail of the free queue: in vLLM a fake block with id -1."""

    block_id = -1

    def __init__(self, queue: FreeQueue, is_head: bool) -> None:
        self._queue = queue
        self._is_head = is_head

    @property
    def next_free_block(self) -> Any:
        """First free block, if this is the head; else None."""
        return self._queue.after(None) if self._is_head else None

    @property
    def prev_free_block(self) -> Any:
        """Last free block, if this is the tail; else None."""
        return None if self._is_head else self._queue.before(None)


class FreeQueue:
    """The part of vLLM's free queue that its connectors use."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.fake_free_list_head = QueueEnd(self, True)
        self.fake_free_list_tail = QueueEnd(self, False)

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks, including cached ones."""
        return self._pool.get_num_free_blocks()

    def after(self, block: Any) -> Any:
        """Return the free block after `block` (None: the first one), or the tail if there is none."""
        return self._beside(block, self._pool.free_block_after, self.fake_free_list_tail)

    def before(self, block: Any) -> Any:
        """Return the free block before `block` (None: the last one), or the head if there is none."""
        return self._beside(block, self._pool.free_block_before, self.fake_free_list_head)

    def _beside(self, block: Any, neighbour: Any, end: QueueEnd) -> Any:
        if block is not None and (block.is_null or block.ref_cnt):
            return None
        found = neighbour(0 if block is None else block.block_id)
        return self._pool.block(found) if found else end

    def get_all_free_blocks(self) -> list[Any]:
        """Return the free blocks in the order of allocation."""
        return [self._pool.block(block_id) for block_id in self._pool.pool.free_block_ids().tolist()]

    def iter_blocks_after(self, block: Any) -> Iterator[Any]:
        """Yield the free blocks after `block`; all of them for None."""
        block_id = self._pool.free_block_after(0 if block is None else block.block_id)
        while block_id:
            yield self._pool.block(block_id)
            block_id = self._pool.free_block_after(block_id)


class HashToBlock:
    """vLLM's map from hashes, with the group's number appended, to blocks."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    def get_one_block(self, key: Any) -> Any:
        """Return the block that has had this hash the longest, or None."""
        found = self._pool.find(key)
        return self._pool.block(found) if found else None

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def _cache(self) -> dict[Any, Any]:
        """The map in vLLM's form, for its tests. O(blocks)."""
        found: dict[Any, dict[int, Any]] = {}
        for key, block_id in self._pool.cached_keys():
            found.setdefault(key, {})[block_id] = self._pool.block(block_id)
        return {key: next(iter(blocks.values())) if len(blocks) == 1 else blocks for key, blocks in found.items()}


class EnginePool:
    """The part of a block pool that vLLM reads, on either level. `pool` is the Blockyard pool."""

    misses: StepMisses | None = None

    def __init__(self, pool: Any, enable_kv_cache_events: bool, metrics_collector: Any) -> None:
        self.pool = pool
        self.counts = pool.ref_counts().data
        self.null_count = 0
        #: Each cached block's first name, and the number of prompt tokens that it covers.
        self.names: dict[int, tuple[Any, int | None]] = {}
        self.null_block: Any = self.block(0)
        self.free_block_queue: Any = FreeQueue(self)
        self.cached_block_hash_to_block: Any = HashToBlock(self)
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[Any] = []
        self.metrics_collector = metrics_collector

    def block(self, block_id: int) -> Block:
        """Return the object of a block."""
        raise NotImplementedError

    def find(self, key: Any) -> int:
        """Return the block that has had a hash (with the group's number appended) the longest, or 0."""
        raise NotImplementedError

    def cached_keys(self) -> Iterator[tuple[Any, int]]:
        """Yield each (hash, block) pair."""
        raise NotImplementedError

    def set_count(self, block_id: int, value: int) -> None:
        """Set the number of holders of a block."""
        raise NotImplementedError

    def free_block_after(self, block_id: int) -> int:
        """Return the free block after one in the queue; 0 stands for the head as an argument, for none as a result."""
        return int(self.pool.free_block_after(block_id))

    def free_block_before(self, block_id: int) -> int:
        """Return the free block before one in the queue; 0 stands for the tail as an argument, for none as a result."""
        return int(self.pool.free_block_before(block_id))

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks, including cached ones."""
        return int(self.pool.num_free_blocks)

    def get_usage(self) -> float:
        """Return the fraction of the blocks in use."""
        return float(self.pool.usage)

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events if self.enable_kv_cache_events else []

    def forget_names(self) -> None:
        """Clear the names after the pool below has cleared its cache."""
        self.names.clear()

    def reset_prefix_cache(self) -> bool:
        """Uncache everything. Return False, and change nothing, while blocks are held."""
        used = self.pool.num_used_blocks
        if used:
            logger.warning("Failed to reset prefix cache because some blocks (%d) are not freed yet", used)
            return False
        self.pool.reset_prefix_cache()
        self.forget_names()
        if self.misses is not None:
            self.misses.note_reset()
        if self.metrics_collector:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        logger.info("Successfully reset prefix cache")
        return True
