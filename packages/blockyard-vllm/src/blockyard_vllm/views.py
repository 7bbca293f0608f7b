"""Blocks and requests' tables on level "tokens", as vLLM's scheduler, connectors and tests read them.

The manager keeps plain ids; objects are created on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from blockyard import BlockLease, FoundBlocks

from .objects import Block
from .token_pool import TokenPool


class BlockIds(KVCacheBlocks):
    """vLLM's KVCacheBlocks over plain ids. `found` is the lookup's result, for the allocation that follows."""

    __slots__ = ("_pool", "found", "ids")

    def __init__(self, pool: TokenPool, ids: list[int], found: FoundBlocks | None = None) -> None:
        self._pool = pool
        self.ids = ids
        self.found = found

    @property
    def blocks(self) -> tuple[Sequence[Any], ...]:  # type: ignore[override]
        """The one group's blocks."""
        return ([Block(self._pool, block_id) for block_id in self.ids],) if self.ids else ((),)

    def get_block_ids(self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None) -> Any:
        if group_ids is not None and not list(group_ids):
            return None if allow_none else ()
        return None if allow_none and not self.ids else (list(self.ids),)

    def __add__(self, other: KVCacheBlocks) -> BlockIds:
        return BlockIds(self._pool, self.ids + other.get_block_ids()[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.get_block_ids() == other.get_block_ids()

    __hash__ = None  # type: ignore[assignment]

    def get_unhashed_block_ids(self) -> list[int]:
        """Return the ids of blocks that cache nothing."""
        return [block_id for block_id in self.ids if block_id not in self._pool.names]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Return the ids of blocks that cache nothing, as one group, without the null block."""
        return [[block_id for block_id in self.get_unhashed_block_ids() if block_id]]

    def new_empty(self) -> BlockIds:
        return BlockIds(self._pool, [])


class TablesView(Mapping[str, Any]):
    """`req_to_blocks` of vLLM's managers: a request that holds nothing has an empty list."""

    def __init__(self, pool: TokenPool, leases: Mapping[str, BlockLease]) -> None:
        self._pool = pool
        self._leases = leases

    def __getitem__(self, request_id: str) -> list[Block]:
        return [self._pool.block(block_id) for block_id in self._leases.get(request_id, ())]

    def get(self, request_id: str, default: Any = None) -> Any:
        return self[request_id] if request_id in self._leases else default

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._leases

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)


class CachedCounts(Mapping[str, int]):
    """`num_cached_block` of vLLM's managers."""

    def __init__(self, leases: Mapping[str, BlockLease]) -> None:
        self._leases = leases

    def __getitem__(self, request_id: str) -> int:
        return self._leases[request_id].num_cached_blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)
