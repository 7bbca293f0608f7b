"""What happened and who holds what, as lines of plain text for a log or a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..answers import AllocationEvent, Holding
from ..arguments import require_int
from ..core.manager import KVCacheManager

_MAX_LINES = 2**20
#: Block ids named on a line.
_MAX_IDS = 12
_ACTIONS = ("take", "share", "give back", "evict")


def describe_history(cache: KVCacheManager, limit: int = 20) -> str:
    """A summary of the allocation history by action, then its latest `limit` events, a line each. O(history_size).

    Raises `InvalidArgument` for a limit outside 0 to 2**20.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2, history_size=100))
    >>> cache.free(cache.allocate([1, 2, 3], "chat"))
    >>> print(describe_history(cache))
    2 events, of which the latest 2 are remembered: take 2 blocks in 1, give back 2 blocks in 1
    event 0 at 0: allocate chat: take 1, 2; 6 free
    event 1 at 0: free chat: give back 1, 2; 8 free
    """
    require_int("limit", limit, 0, _MAX_LINES)
    if cache.config.history_size == 0:
        return "nothing is remembered: history_size is 0"
    events = cache.history()
    if not events:
        return "nothing has happened yet"
    latest = events[len(events) - min(limit, len(events)) :]
    return "\n".join([_summary(events), *(_event_line(event) for event in latest)])


def describe_leaks(cache: KVCacheManager, limit: int = 20) -> str:
    """Who holds which blocks now, at most `limit` holders, a line each. O(num_blocks + held blocks).

    At the end of work, each of them is a leak. The first line says where all blocks are: used + cached + free is the
    pool. Blocks counted as used that nobody holds are named as missing: then `check` says what is wrong.
    Raises `InvalidArgument` for a limit outside 0 to 2**20.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    >>> seq = cache.allocate([1, 2, 3], "chat")
    >>> print(describe_leaks(cache))  # doctest: +ELLIPSIS
    2 of 8 blocks are used, 0 idle and cached, 6 free; holders: 1
    sequence ... 'chat': 3 tokens, 2 blocks: 1, 2
    """
    require_int("limit", limit, 0, _MAX_LINES)
    holdings = cache.leak_report()
    lines = [_balance(cache, len(holdings)), *(_holding_line(holding) for holding in holdings[:limit])]
    if len(holdings) > limit:
        lines.append(f"and {len(holdings) - limit:,} more")
    held = {block for holding in holdings for block in holding.block_ids}
    missing = cache.num_used_blocks - len(held)
    if missing:
        lines.append(f"{missing:,} blocks are counted as used, but held by nobody")
    return "\n".join(lines)


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
    return f"event {event.number} at {event.time:g}: {event.actor}: {event.action} {ids}; {event.num_free:,} free"


def _balance(cache: KVCacheManager, num_holders: int) -> str:
    idle = int((cache.pool.cached_mask() & (cache.pool.ref_counts() == 0)).sum())
    free = cache.num_free_blocks - idle
    total = cache.pool.num_usable_blocks
    places = f"{cache.num_used_blocks:,} of {total:,} blocks are used, {idle:,} idle and cached, {free:,} free"
    return f"{places}; holders: {num_holders:,}"


def _holding_line(holding: Holding) -> str:
    parts = [f"{holding.num_tokens:,} tokens"] if holding.kind != "lease" else []
    if holding.block_ids:
        parts.append(f"{len(holding.block_ids):,} blocks: {_ids(holding.block_ids)}")
    if holding.cpu_block_ids:
        parts.append(f"{len(holding.cpu_block_ids):,} CPU blocks: {_ids(holding.cpu_block_ids)}")
    return f"{holding.kind} {holding.handle} {holding.holder!r}: {', '.join(parts) or 'nothing'}"


def _ids(blocks: Sequence[int]) -> str:
    """The first ids, and how many there are where not all are named."""
    named = ", ".join(str(block) for block in blocks[:_MAX_IDS])
    return named if len(blocks) <= _MAX_IDS else f"{named}, ... ({len(blocks):,} in all)"
