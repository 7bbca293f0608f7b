"""Blocks, tables and the pool of level "tokens", as the scheduler, connectors and vLLM's tests read them.

The manager keeps plain ids; objects are made when vLLM asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_GPU
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from ... import BlockLease, FoundBlocks

if TYPE_CHECKING:
    from .manager import KVCacheManager


class BlockView:
    """A block as vLLM's code reads it; `lease` and `position` say how to give it back."""

    __slots__ = ("_manager", "block_id", "lease", "position")

    def __init__(self, manager: KVCacheManager, block_id: int, lease: BlockLease | None = None, position: int = 0):
        self._manager = manager
        self.block_id = block_id
        self.lease = lease
        self.position = position

    @property
    def is_null(self) -> bool:
        """Whether it is the placeholder."""
        return self.block_id == 0

    @property
    def ref_cnt(self) -> int:
        """How often it is held."""
        return int(self._manager.counts[self.block_id])

    @property
    def block_hash(self) -> Any:
        """vLLM's hash of what it caches, with the group's number; None where it caches nothing."""
        return self._manager.names.get(self.block_id, (None, None))[0]

    _block_hash = block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """How many tokens of a prompt that hash stands for."""
        return self._manager.names.get(self.block_id, (None, None))[1]

    @property
    def next_free_block(self) -> Any:
        """The block allocated after it; None for one that is held."""
        return self._manager.block_pool.free_block_queue.beside(self, 1)

    @property
    def prev_free_block(self) -> Any:
        """The block allocated before it; None for one that is held."""
        return self._manager.block_pool.free_block_queue.beside(self, -1)

    def __eq__(self, other: object) -> bool:
        return getattr(other, "block_id", None) == self.block_id

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BlockView({self.block_id}, ref_cnt={self.ref_cnt})"


class BlockIds(KVCacheBlocks):
    """vLLM's KVCacheBlocks over plain ids; `found` is what a lookup returned, for the allocation that follows."""

    __slots__ = ("_manager", "found", "ids")

    def __init__(self, manager: KVCacheManager, ids: list[int], found: FoundBlocks | None = None) -> None:
        self._manager = manager
        self.ids = ids
        self.found = found

    @property
    def blocks(self) -> tuple[Sequence[Any], ...]:  # type: ignore[override]
        """One group of blocks."""
        return ([BlockView(self._manager, block_id) for block_id in self.ids],) if self.ids else ((),)

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> Any:
        """The ids of the one group."""
        if group_ids is not None and not list(group_ids):
            return None if allow_none else ()
        return None if allow_none and not self.ids else (list(self.ids),)

    def __add__(self, other: KVCacheBlocks) -> BlockIds:
        return BlockIds(self._manager, self.ids + other.get_block_ids()[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.get_block_ids() == other.get_block_ids()

    __hash__ = None  # type: ignore[assignment]

    def get_unhashed_block_ids(self) -> list[int]:
        """Those that cache nothing."""
        return [block_id for block_id in self.ids if block_id not in self._manager.names]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The same, in a list of one group, without the null block."""
        return [[block_id for block_id in self.get_unhashed_block_ids() if block_id]]

    def new_empty(self) -> BlockIds:
        """None of them."""
        return BlockIds(self._manager, [])


class QueueView:
    """The free queue. Each question reads all of it: for tests and reports."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.fake_free_list_head = EndView(self, True)
        self.fake_free_list_tail = EndView(self, False)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return self._manager.pool.num_free_blocks

    def get_all_free_blocks(self) -> list[BlockView]:
        """In the order in which they will be allocated."""
        return [BlockView(self._manager, block_id) for block_id in self._manager.pool.free_block_ids().tolist()]

    def beside(self, block: BlockView, step: int) -> Any:
        """The neighbour of a free block, or an end of the queue."""
        if block.is_null or block.ref_cnt:
            return None
        line = [self.fake_free_list_head, *self.get_all_free_blocks(), self.fake_free_list_tail]
        return line[line.index(block) + step]


class EndView:
    """An end of the queue, which vLLM has as a block of id -1."""

    block_id = -1

    def __init__(self, queue: QueueView, is_head: bool) -> None:
        self._queue = queue
        self._is_head = is_head

    @property
    def next_free_block(self) -> Any:
        """The first free block, of the head."""
        return [*self._queue.get_all_free_blocks(), self._queue.fake_free_list_tail][0] if self._is_head else None

    @property
    def prev_free_block(self) -> Any:
        """The last free block, of the tail."""
        return None if self._is_head else [self._queue.fake_free_list_head, *self._queue.get_all_free_blocks()][-1]


class HashView:
    """Which of vLLM's hashes are cached, from the manager's notes. O(cached blocks)."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def _cache(self) -> dict[Any, Any]:
        found: dict[Any, dict[int, BlockView]] = {}
        for block_id, (name, _) in self._manager.names.items():
            found.setdefault(name, {})[block_id] = BlockView(self._manager, block_id)
        return {name: next(iter(blocks.values())) if len(blocks) == 1 else blocks for name, blocks in found.items()}

    def get_one_block(self, key: Any) -> BlockView | None:
        """A block of this hash."""
        found = [block_id for block_id, (name, _) in self._manager.names.items() if name == key]
        return BlockView(self._manager, found[0]) if found else None

    def __len__(self) -> int:
        return len(self._cache)


class PoolView:
    """What the scheduler and connectors ask of vLLM's block pool."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.num_gpu_blocks = manager.num_blocks
        self.null_block = BlockView(manager, 0)
        self.enable_kv_cache_events = manager.enable_kv_cache_events
        self.enable_caching = manager.enable_caching
        self.hash_block_size = manager.block_size
        self.medium = MEDIUM_GPU
        self.metrics_collector = manager.metrics_collector
        self.free_block_queue = QueueView(manager)
        self.cached_block_hash_to_block = HashView(manager)

    @property
    def blocks(self) -> list[BlockView]:
        """All blocks."""
        return [BlockView(self._manager, block_id) for block_id in range(self.num_gpu_blocks)]

    @property
    def kv_event_queue(self) -> list[Any]:
        """Events that have not been taken."""
        return self._manager.events

    def get_usage(self) -> float:
        """Share of the blocks in use."""
        return self._manager.pool.usage

    def get_num_free_blocks(self) -> int:
        """Free blocks, cached ones included."""
        return self._manager.pool.num_free_blocks

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[BlockView] | None:
        """By vLLM's hash, from the manager's notes. O(cached blocks)."""
        found = self.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(block_hash, 0))
        return [found] if found else None

    def get_new_blocks(self, num_blocks: int) -> list[BlockView]:
        """Blocks under a lease of their own."""
        lease = self._manager.pool.get_new_blocks(num_blocks)
        self._manager.note_taken(list(lease))
        return [BlockView(self._manager, block_id, lease, place) for place, block_id in enumerate(lease)]

    def free_blocks(self, ordered_blocks: Iterable[BlockView]) -> None:
        """Free what `pop_blocks_for_free` or `get_new_blocks` returned: whole leases, or parts of them."""
        given: dict[int, list[BlockView]] = {}
        for block in ordered_blocks:
            if block.lease is None:
                raise ValueError(f"block {block.block_id} was not handed out to be freed on level 'tokens'")
            given.setdefault(block.lease.serial, []).append(block)
        for blocks in given.values():
            self._free_part(blocks[0].lease, [block.position for block in blocks])

    def _free_part(self, lease: Any, positions: list[int]) -> None:
        pool = self._manager.pool
        if len(positions) < sum(1 for block_id in lease if block_id):
            for position in positions:
                pool.release(lease, position, position + 1)
        else:
            pool.free_blocks(lease)

    def touch(self, blocks: Sequence[Any]) -> None:
        """Not on this level: connectors that pin blocks by id need level "names"."""
        raise NotImplementedError("blockyard: blocks are not held by id on level 'tokens'; set level to 'names'")

    def evict_blocks(self, block_ids: set[int]) -> None:
        """See the manager."""
        self._manager.evict_blocks(block_ids)

    def take_events(self) -> list[Any]:
        """What happened since the last call."""
        return self._manager.drain_events()


class TablesView(Mapping[str, Any]):
    """`req_to_blocks` of vLLM's managers, where a request that holds nothing has an empty list."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def __getitem__(self, request_id: str) -> list[BlockView]:
        return [BlockView(self._manager, block_id) for block_id in self._manager.leases.get(request_id, ())]

    def get(self, request_id: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[request_id] if request_id in self._manager.leases else default

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._manager.leases

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.leases)

    def __len__(self) -> int:
        return len(self._manager.leases)


class CachedCounts(Mapping[str, int]):
    """`num_cached_block` of vLLM's managers."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def __getitem__(self, request_id: str) -> int:
        return self._manager.leases[request_id].num_cached_blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._manager.leases)

    def __len__(self) -> int:
        return len(self._manager.leases)
