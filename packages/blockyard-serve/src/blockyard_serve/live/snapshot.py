"""A copy of the cache between two steps, made in its own thread with as little work as possible."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockyard import KVCacheManager
from blockyard.answers import CacheStats, MissCauses
from blockyard.extending import LeasePool

from .call_queue import EngineStatus


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """The blocks of a pool from block 0 on, including those beyond its end while it shrinks.

    Attributes:
        ref_counts: int32, reference counts.
        states: uint8, `BlockState` values.
    """

    ref_counts: NDArray[np.int32]
    states: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A sequence.

    Attributes:
        handle: its handle in the cache.
        holder: its name in the cache.
        is_swapped: whether its blocks are in the CPU pool.
        block_ids: int32, its blocks in each layer group.
    """

    handle: int
    holder: str
    num_tokens: int
    num_computed: int
    is_swapped: bool
    block_ids: tuple[NDArray[np.int32], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cache between two steps, for other threads to read.

    Attributes:
        misses: causes of misses, if the cache tracks them.
        status: the owner's status.
        taken_at: time of the copy, in seconds of `time.perf_counter`.
        seconds: duration of the copy.
    """

    pool: PoolCopy
    cpu_pool: PoolCopy | None
    rows: list[SequenceRow]
    block_size: int
    stats: CacheStats
    misses: MissCauses | None
    status: EngineStatus
    taken_at: float
    seconds: float


def take_snapshot(cache: KVCacheManager, status: EngineStatus) -> Snapshot:
    """Copy the data that the page shows. Only in the cache's thread. O(num_blocks + held blocks), memory copies."""
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
        status=status,
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
            tokens[row],
            computed[row],
            cache.is_swapped_out(handle),
            tuple(cache.block_ids(handle, group) for group in range(num_groups)),
        )
        for row, handle in enumerate(handles)
    ]
