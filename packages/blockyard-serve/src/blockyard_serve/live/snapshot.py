"""What is copied of a cache between two steps, in its own thread: as little work as can be, nothing is formatted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.answers import CacheStats, MissCauses
from blockyard.extending import LeasePool

from .desk import Surroundings


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """A pool's blocks from block 0, also those beyond its end while it shrinks. ref_counts: int32. states: uint8, the
    `BlockState` of each."""

    ref_counts: NDArray[np.int32]
    states: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A sequence. handle, holder: the cache's. block_ids: int32, for each layer group. is_swapped: all its blocks are
    in the CPU pool."""

    handle: int
    holder: str
    num_tokens: int
    num_computed: int
    is_swapped: bool
    block_ids: tuple[NDArray[np.int32], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cache at one moment between two steps, for other threads to read.

    misses: None where the cache does not explain them. seconds: what it took to copy.
    """

    pool: PoolCopy
    cpu_pool: PoolCopy | None
    rows: list[SequenceRow]
    block_size: int
    stats: CacheStats
    misses: MissCauses | None
    around: Surroundings
    taken_at: float
    seconds: float


def take_snapshot(cache: KVCacheManager, around: Surroundings) -> Snapshot:
    """Copy what the page shows. Only in the thread that owns the cache. O(num_blocks + held blocks), memory copies."""
    start = time.perf_counter()
    groups, cpu = cache.config.layer_groups, cache.cpu_pool
    pool = _copy(cache.pool)
    rows = _rows(cache, len(groups))
    return Snapshot(
        pool=pool,
        cpu_pool=None if cpu is None else _copy(cpu),
        rows=rows,
        block_size=cache.block_size,
        stats=cache.stats(),
        misses=cache.miss_totals() if cache.config.observe.track_misses else None,
        around=around,
        taken_at=start,
        seconds=time.perf_counter() - start,
    )


def _copy(pool: LeasePool) -> PoolCopy:
    return PoolCopy(pool.ref_counts().copy(), pool.states())


def _rows(cache: KVCacheManager, num_groups: int) -> list[SequenceRow]:
    running = cache.running()
    handles = list(running)
    tokens, computed = cache.num_tokens(handles).tolist(), cache.num_computed_tokens(handles).tolist()
    return [
        SequenceRow(
            handle,
            running[handle],
            tokens[place],
            computed[place],
            cache.is_swapped_out(handle),
            tuple(cache.block_ids(handle, group) for group in range(num_groups)),
        )
        for place, handle in enumerate(handles)
    ]
