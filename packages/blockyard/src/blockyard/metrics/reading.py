"""The numbers of a cache at one moment, made by a thread that may call the cache and readable in any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..answers import BlockState, CacheStats, MissCauses, Residency, RetentionEnds
from ..config import CacheConfig
from ..core.manager import KVCacheManager
from ..core.pools.lease_pool import LeasePool


@dataclass(frozen=True, slots=True)
class BlockStates:
    """Number of blocks of a pool in each state. They add up to the usable blocks and those beyond the pool's end.

    Attributes:
        private: held and not cached, including blocks that only a step in flight keeps.
        shared: held and cached, including blocks still to be computed.
        idle: cached and not held.
        free: neither.
        retiring: held beyond the end of a pool that shrank; removed when freed.
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
    """Size and counters of a pool.

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens per block.
        enable_prefix_caching: whether it caches prefixes.
        usage: fraction of the usable blocks that is held, 0 to 1.
        num_used: held blocks now.
        num_free: free blocks now, idle ones included.
        num_cached: cached blocks now.
        peak_used: most blocks held at once.
        num_allocated: blocks allocated so far.
        num_evicted: blocks evicted so far.
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
        """Read them from a pool. O(1)."""
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
    """The numbers that `CacheCollector` shows of a cache.

    Attributes:
        pool: size and counters of the pool.
        blocks: its blocks by state.
        config: None for a bare pool, which has no sequences and counts no tokens.
        stats: None for a bare pool.
        cpu_blocks: blocks of the CPU pool; None without one.
        residency: None if not recorded (`residency_sample`).
        misses: None if not recorded (`track_misses`).
        ended_retentions: None without a budget (`retention_blocks`).
        num_preemptions: sequences preempted so far; None if unknown.
        num_cpu_hit_tokens: tokens of `stats.num_hit_tokens` found in the CPU pool; None if unknown.
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
        """Read a manager, and add the numbers that only its engine counts. O(num_blocks + max_num_seqs)."""
        config, cpu_pool = cache.config, cache.cpu_pool
        return cls(
            pool=PoolCounts.of(cache.pool),
            blocks=BlockStates.of(cache.pool),
            config=config,
            stats=cache.stats(),
            cpu_blocks=None if cpu_pool is None else BlockStates.of(cpu_pool),
            residency=cache.residency() if config.observe.residency_sample else None,
            misses=cache.miss_totals() if config.observe.track_misses else None,
            ended_retentions=cache.ended_retentions if config.hints.retention_blocks else None,
            num_preemptions=num_preemptions,
            num_cpu_hit_tokens=0 if cpu_pool is None else num_cpu_hit_tokens,
        )

    @classmethod
    def of_pool(cls, pool: LeasePool) -> CacheReading:
        """Read a pool. O(num_blocks)."""
        return cls(pool=PoolCounts.of(pool), blocks=BlockStates.of(pool))

    @property
    def hit_tokens(self) -> tuple[int, int] | None:
        """Return the hit tokens found in the pool and in the CPU pool; None if unknown."""
        if self.stats is None or self.num_cpu_hit_tokens is None:
            return None
        from_cpu = min(self.num_cpu_hit_tokens, self.stats.num_hit_tokens)
        return self.stats.num_hit_tokens - from_cpu, from_cpu
