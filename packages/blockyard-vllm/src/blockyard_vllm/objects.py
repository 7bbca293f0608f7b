"""vLLM's block, its free queue and its map from hashes to blocks, over a pool of ours: one set for both levels.

They keep nothing. Each asks the `EnginePool` of its level, which says what is free, what is held and what is cached.
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
    """A block as vLLM's code reads it.

    lease and position say how to give it back where it was handed out from a lease.
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
        """Return how often it is held. The null block's count is vLLM's own affair."""
        return self.pool.null_count if self.is_null else self.pool.counts[self.block_id]

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        """vLLM's managers count up by themselves (`cow_block.ref_cnt += 1`)."""
        self.pool.set_count(self.block_id, value)

    @property
    def block_hash(self) -> Any:
        """Return its first name, the hash with the group's number behind; None where it caches nothing."""
        name = self.pool.names.get(self.block_id)
        return None if name is None else name[0]

    _block_hash = block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Return how many tokens of a prompt that name stands for."""
        name = self.pool.names.get(self.block_id)
        return None if name is None else name[1]

    def set_block_hash(self, block_hash: Any, num_tokens: int | None = None) -> None:
        """Note its first name."""
        assert self.block_hash is None, "The block already has a hash. This should not happen."
        self.pool.names[self.block_id] = (block_hash, num_tokens)

    @property
    def next_free_block(self) -> Any:
        """Return the block that is allocated after it; None for a block that is held."""
        return self.pool.free_block_queue.after(self)

    @property
    def prev_free_block(self) -> Any:
        """Return the block that is allocated before it; None for a block that is held."""
        return self.pool.free_block_queue.before(self)

    def __eq__(self, other: object) -> bool:
        return self is other or getattr(other, "block_id", None) == self.block_id

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class End:
    """An end of the free queue, which vLLM has as a block of id -1."""

    block_id = -1

    def __init__(self, queue: FreeQueue, is_head: bool) -> None:
        self._queue = queue
        self._is_head = is_head

    @property
    def next_free_block(self) -> Any:
        """Return the first free block, of the head."""
        return self._queue.after(None) if self._is_head else None

    @property
    def prev_free_block(self) -> Any:
        """Return the last free block, of the tail."""
        return None if self._is_head else self._queue.before(None)


class FreeQueue:
    """What vLLM's connectors ask of its free queue."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.fake_free_list_head = End(self, True)
        self.fake_free_list_tail = End(self, False)

    @property
    def num_free_blocks(self) -> int:
        """Return how many blocks are free, cached ones included."""
        return self._pool.get_num_free_blocks()

    def after(self, block: Any) -> Any:
        """Return the next one of a free block, or the end; the first one of None."""
        return self._beside(block, self._pool.free_block_after, self.fake_free_list_tail)

    def before(self, block: Any) -> Any:
        """Return the one before a free block, or the end; the last one of None."""
        return self._beside(block, self._pool.free_block_before, self.fake_free_list_head)

    def _beside(self, block: Any, neighbour: Any, end: End) -> Any:
        if block is not None and (block.is_null or block.ref_cnt):
            return None
        found = neighbour(0 if block is None else block.block_id)
        return self._pool.block(found) if found else end

    def get_all_free_blocks(self) -> list[Any]:
        """Return them in the order in which they will be allocated."""
        return [self._pool.block(block_id) for block_id in self._pool.pool.free_block_ids().tolist()]

    def iter_blocks_after(self, block: Any) -> Iterator[Any]:
        """Yield the free blocks behind one of them; all of them for None."""
        block_id = self._pool.free_block_after(0 if block is None else block.block_id)
        while block_id:
            yield self._pool.block(block_id)
            block_id = self._pool.free_block_after(block_id)


class HashToBlock:
    """vLLM's map from hashes, each with its group's number behind, to blocks."""

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
        """Return the map as vLLM has it, for its tests. O(blocks)."""
        found: dict[Any, dict[int, Any]] = {}
        for key, block_id in self._pool.cached_keys():
            found.setdefault(key, {})[block_id] = self._pool.block(block_id)
        return {key: next(iter(blocks.values())) if len(blocks) == 1 else blocks for key, blocks in found.items()}


class EnginePool:
    """What vLLM reads of a block pool, on either level. `pool` is the pool of ours below."""

    misses: StepMisses | None = None

    def __init__(self, pool: Any, enable_kv_cache_events: bool, metrics_collector: Any) -> None:
        self.pool = pool
        self.counts = pool.ref_counts().data
        self.null_count = 0
        #: Of each cached block: its first name, and how many tokens of a prompt that stands for.
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
        """Return the block that has had a hash, with its group's number behind, the longest; 0: none."""
        raise NotImplementedError

    def cached_keys(self) -> Iterator[tuple[Any, int]]:
        """Return each hash of each block."""
        raise NotImplementedError

    def set_count(self, block_id: int, value: int) -> None:
        """Hold a block as often as that."""
        raise NotImplementedError

    def free_block_after(self, block_id: int) -> int:
        """Return the free block that is allocated after a free one; after 0 the first. 0: none."""
        return int(self.pool.free_block_after(block_id))

    def free_block_before(self, block_id: int) -> int:
        """Return the free block that is allocated before a free one; before 0 the last. 0: none."""
        return int(self.pool.free_block_before(block_id))

    def get_num_free_blocks(self) -> int:
        """Return how many blocks are free, cached ones included."""
        return int(self.pool.num_free_blocks)

    def get_usage(self) -> float:
        """Return the share of the blocks in use."""
        return float(self.pool.usage)

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events if self.enable_kv_cache_events else []

    def forget_names(self) -> None:
        """The pool below has forgotten all that was cached."""
        self.names.clear()

    def reset_prefix_cache(self) -> bool:
        """Forget all that is cached; False, and nothing happens, while blocks are held."""
        used = self.pool.num_used_blocks
        if used:
            logger.warning("Failed to reset prefix cache because some blocks (%d) are not freed yet", used)
            return False
        self.pool.reset_prefix_cache()
        self.forget_names()
        if self.misses is not None:
            self.misses.were_reset()
        if self.metrics_collector:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        logger.info("Successfully reset prefix cache")
        return True
