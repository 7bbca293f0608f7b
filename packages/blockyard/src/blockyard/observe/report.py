"""Allocation history, leaks and blocks as lines of text, for a log or a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..answers import AllocationEvent, BlockState, Holding, RetentionEnds
from ..arguments import require_int
from ..core.blocks.block import KVCacheBlock
from ..core.manager import KVCacheManager
from ..core.pools.lease_pool import LeasePool
from ..core.pools.named_pool import NamedPool
from ..core.pools.standalone_pool import StandalonePool
from .picture import pool_of

_MAX_LINES = 2**20
#: Block ids named on a line.
_MAX_IDS = 12
_ACTIONS = ("take", "share", "release", "evict", *(f"retention {cause}" for cause in RetentionEnds.CAUSES))


def describe_history(cache: KVCacheManager | LeasePool, limit: int = 20) -> str:
    """Return a summary of the allocation history, then its latest `limit` events, one per line. O(history_size).

    The first line also counts all blocks allocated and freed so far, remembered or not. Raises `InvalidArgument` for a
    limit outside 0 to 2**20.

    >>> from blockyard import CacheConfig, KVCacheManager, ObserveConfig
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2, observe=ObserveConfig(history_size=100)))
    >>> cache.free(cache.allocate([1, 2, 3], holder="chat"))
    >>> print(describe_history(cache))  # doctest: +ELLIPSIS
    2 events, ... are remembered: take 2 blocks in 1, release 2 blocks in 1; in all 2 blocks ...
    event 0 at 0: allocate 'chat': take 1, 2; 6 free
    event 1 at 0: free 'chat': release 1, 2; 8 free
    """
    require_int("limit", limit, 0, _MAX_LINES)
    pool = pool_of(cache)
    events = cache.history()
    if not events:
        is_off = (
            pool.num_allocated_blocks > 0 if isinstance(cache, LeasePool) else cache.config.observe.history_size == 0
        )
        return "nothing is remembered: history_size is 0" if is_off else "nothing has happened yet"
    latest = events[len(events) - min(limit, len(events)) :]
    counts = f"in all {pool.num_allocated_blocks:,} blocks allocated, {pool.num_freed_blocks:,} freed"
    return "\n".join([f"{_summary(events)}; {counts}", *(_event_line(event) for event in latest)])


def describe_leaks(cache: KVCacheManager | LeasePool, limit: int = 20) -> str:
    """Return the holders of blocks, at most `limit`, one per line. O(num_blocks + held blocks).

    At the end of work each of them is a leak. The first line accounts for all blocks: used, idle and free ones add up
    to the pool. Blocks counted as used without a holder are reported; `check` then names the broken invariant. Raises
    `InvalidArgument` for a limit outside 0 to 2**20.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    >>> seq = cache.allocate([1, 2, 3], holder="chat")
    >>> print(describe_leaks(cache))  # doctest: +ELLIPSIS
    2 of 8 blocks are used, 0 idle and cached, 6 free; holders: 1
    sequence ... 'chat': 3 tokens, 2 blocks: 1, 2
    """
    require_int("limit", limit, 0, _MAX_LINES)
    pool = pool_of(cache)
    holdings = _lease_holdings(cache) if isinstance(cache, LeasePool) else cache.leak_report()
    lines = [_balance(pool, len(holdings)), *(_holding_line(holding) for holding in holdings[:limit])]
    if len(holdings) > limit:
        lines.append(f"and {len(holdings) - limit:,} more")
    held = {block for holding in holdings for block in holding.block_ids}
    missing = pool.num_used_blocks - len(held)
    if missing and isinstance(cache, (KVCacheManager, StandalonePool)):
        lines.append(f"{missing:,} blocks are counted as used, but have no holder")
    return "\n".join(lines)


def describe_blocks(cache: KVCacheManager | LeasePool, block_ids: Iterable[int] | None = None) -> str:
    """Return a line for each block: its state, its known tokens and its holders. O(blocks described * held blocks).

    Args:
        cache: manager or pool.
        block_ids: blocks to describe; None for all that are held or cached.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    >>> seq = cache.allocate([1, 2, 3], holder="chat")
    >>> print(describe_blocks(cache))  # doctest: +ELLIPSIS
    block 1: pending, ref_cnt 1, 2 tokens, sequence ... 'chat'
    block 2: private, ref_cnt 1, 1 tokens, sequence ... 'chat'
    """
    pool = pool_of(cache)
    states = pool.states()
    num_leases = Counter(block for lease in pool.leases() for block in lease.held_ids())
    if block_ids is None:
        block_ids = np.flatnonzero((states != BlockState.FREE) & (states != BlockState.GONE)).tolist()
    return "\n".join(_block_line(cache.block(block_id), states, num_leases[block_id]) for block_id in block_ids)


def _block_line(block: KVCacheBlock, states: npt.NDArray[np.uint8], num_leases: int) -> str:
    state = "null" if block.is_null else BlockState(states[block.block_id]).name.lower()
    parts = [state, f"ref_cnt {block.ref_cnt}"] if block.ref_cnt else [state]
    if block.num_tokens:
        parts.append(f"{block.num_tokens} tokens")
    if block.group:
        parts.append(f"group {block.group}")
    # Leases come first, by the bare names that their takers chose; sequences and steps are named by the cache.
    leases = [f"lease {holder!r}" if holder else "a lease" for holder in block.holders[:num_leases]]
    return f"block {block.block_id}: {', '.join([*parts, *leases, *block.holders[num_leases:]])}"


def _lease_holdings(pool: LeasePool) -> list[Holding]:
    holdings = [Holding("lease", lease.serial, lease.holder, 0, list(lease), []) for lease in pool.leases()]
    if isinstance(pool, NamedPool):
        loose = np.flatnonzero(pool.loose_counts()).tolist()
        holdings += [Holding("ids", len(loose), "without a lease", 0, loose, [])] if loose else []
    return holdings


def _summary(events: list[AllocationEvent]) -> str:
    parts = []
    for action in _ACTIONS:
        blocks = [len(event.block_ids) for event in events if event.action == action]
        if blocks:
            parts.append(f"{action} {sum(blocks):,} blocks in {len(blocks):,}")
    happened = events[-1].number + 1
    return f"{happened:,} events, of which the latest {len(events):,} are remembered: {', '.join(parts)}"


def _event_line(event: AllocationEvent) -> str:
    ids = _ids(event.block_ids)
    call, _, holder = event.actor.partition(" ")
    actor = f"{call} {holder!r}" if holder else call
    return f"event {event.number} at {event.time:g}: {actor}: {event.action} {ids}; {event.num_free:,} free"


def _balance(pool: LeasePool, num_holders: int) -> str:
    idle = int(np.count_nonzero(pool.states() == BlockState.IDLE))
    free = pool.num_free_blocks - idle
    total = pool.num_usable_blocks
    places = f"{pool.num_used_blocks:,} of {total:,} blocks are used, {idle:,} idle and cached, {free:,} free"
    return f"{places}; holders: {num_holders:,}"


def _holding_line(holding: Holding) -> str:
    parts = [f"{holding.num_tokens:,} tokens"] if holding.kind not in ("lease", "ids") else []
    if holding.block_ids:
        parts.append(f"{len(holding.block_ids):,} blocks: {_ids(holding.block_ids)}")
    if holding.cpu_block_ids:
        parts.append(f"{len(holding.cpu_block_ids):,} CPU blocks: {_ids(holding.cpu_block_ids)}")
    return f"{holding.kind} {holding.handle} {holding.holder!r}: {', '.join(parts) or 'nothing'}"


def _ids(blocks: Sequence[int]) -> str:
    named = ", ".join(str(block) for block in blocks[:_MAX_IDS])
    return named if len(blocks) <= _MAX_IDS else f"{named}, ... ({len(blocks):,} in all)"
