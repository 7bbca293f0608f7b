"""The numbers of one cache at one moment, made where the cache may be asked and read anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..answers import BlockState, CacheStats, MissCauses, Residency, RetentionEnds
from ..config import CacheConfig
from ..core.manager import KVCacheManager
from ..core.pools.lease_pool import LeasePool


@dataclass(frozen=True, slots=True)
class BlockStates:
    """How many blocks of a pool are in each state; together they are the usable blocks, and those beyond its end.

    private: held and not cached, also where only a step in flight keeps it. shared: held and cached, also where it is
    still to be computed. idle: cached and held by none. free: neither. retiring: held beyond the end of a pool that
    shrank, gone when freed.
    """

    private: int
    shared: int
    idle: int
    free: int
    retiring: int

    @classmethod
    def of(cls, pool: LeasePool) -> BlockStates:
        """Count the blocks of a pool. O(num_blocks), in numpy."""
        counts = np.bincount(pool.states(), minlength=len(BlockState)).tolist()
        return cls(
            private=counts[BlockState.PRIVATE] + counts[BlockState.FENCED],
            shared=counts[BlockState.SHARED] + counts[BlockState.PENDING],
            idle=counts[BlockState.IDLE],
            free=counts[BlockState.FREE],
            retiring=counts[BlockState.RETIRING],
        )


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """What every pool counts by itself.

    num_blocks, block_size, enable_prefix_caching: what it is. usage: share of the usable blocks that is held, 0 to 1.
    num_used, num_free, num_cached: blocks now. peak_used: most held at once. num_allocated, num_evicted: so far.
    """

    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    usage: float
    num_used: int
    num_free: int
    num_cached: int
    peak_used: int
    num_allocated: int
    num_evicted: int

    @classmethod
    def of(cls, pool: LeasePool) -> PoolCounts:
        """Read them. O(1)."""
        return cls(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            enable_prefix_caching=pool.enable_prefix_caching,
            usage=pool.usage,
            num_used=pool.num_used_blocks,
            num_free=pool.num_free_blocks,
            num_cached=pool.num_cached_blocks,
            peak_used=pool.peak_used_blocks,
            num_allocated=pool.num_allocated_blocks,
            num_evicted=pool.num_evicted_blocks,
        )


@dataclass(frozen=True, slots=True)
class CacheReading:
    """What `CacheCollector` shows of one cache.

    config, stats: None of a bare pool, which has no sequences and counts no tokens. cpu_blocks: None without a CPU
    pool. residency, misses: None where the cache does not follow them (`residency_sample`, `track_misses`).
    ended_retentions: None without a budget of them (`retention_blocks`).
    num_preemptions: sequences preempted so far; None where nothing counts them. num_cpu_hit_tokens: those of
    `stats.num_hit_tokens` that lay in the CPU pool; None where nothing counts them and there is such a pool.
    """

    pool: PoolCounts
    blocks: BlockStates
    config: CacheConfig | None = None
    stats: CacheStats | None = None
    cpu_blocks: BlockStates | None = None
    residency: Residency | None = None
    misses: MissCauses | None = None
    ended_retentions: RetentionEnds | None = None
    num_preemptions: int | None = None
    num_cpu_hit_tokens: int | None = None

    @classmethod
    def of(
        cls, cache: KVCacheManager, num_preemptions: int | None = None, num_cpu_hit_tokens: int | None = None
    ) -> CacheReading:
        """Read a cache, and add what only its engine counts. O(num_blocks + max_num_seqs). It changes nothing."""
        config, cpu_pool = cache.config, cache.cpu_pool
        return cls(
            pool=PoolCounts.of(cache.pool),
            blocks=BlockStates.of(cache.pool),
            config=config,
            stats=cache.stats(),
            cpu_blocks=None if cpu_pool is None else BlockStates.of(cpu_pool),
            residency=cache.residency() if config.residency_sample else None,
            misses=cache.miss_totals() if config.track_misses else None,
            ended_retentions=cache.ended_retentions if config.retention_blocks else None,
            num_preemptions=num_preemptions,
            num_cpu_hit_tokens=0 if cpu_pool is None else num_cpu_hit_tokens,
        )

    @classmethod
    def of_pool(cls, pool: LeasePool) -> CacheReading:
        """Read a pool that is used without a manager, or that of a manager alone. O(num_blocks). It changes nothing."""
        return cls(pool=PoolCounts.of(pool), blocks=BlockStates.of(pool))

    @property
    def hit_tokens(self) -> tuple[int, int] | None:
        """Count the hit tokens that lay in the pool, and in the CPU pool; None where nothing tells them apart."""
        if self.stats is None or self.num_cpu_hit_tokens is None:
            return None
        from_cpu = min(self.num_cpu_hit_tokens, self.stats.num_hit_tokens)
        return self.stats.num_hit_tokens - from_cpu, from_cpu
