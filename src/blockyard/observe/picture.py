"""A picture of the pool for a terminal: a character a block, or for several."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..core.manager import KVCacheManager
from ..errors import InvalidArgument

SHARED, HELD, IDLE, FREE = "█", "▒", "░", "·"
_MEANINGS = {
    SHARED: "shared by several sequences",
    HELD: "held by one",
    IDLE: "idle: held by none, still cached",
    FREE: "free",
}
_MAX_LINES = 16


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The state of each usable block in order of its id, from block 1, as characters of the legend."""

    states: str

    @property
    def num_held(self) -> int:
        """Blocks that some sequence holds."""
        return self.states.count(SHARED) + self.states.count(HELD)


def snapshot_pool(cache: KVCacheManager) -> PoolSnapshot:
    """What each block is doing now, to be drawn later. O(num_blocks)."""
    counts, cached = cache.pool.ref_counts().tolist(), cache.pool.cached_mask().tolist()
    blocks = zip(counts[1:], cached[1:], strict=True)  # block 0 is the null block: nobody's
    return PoolSnapshot("".join(_state(count, is_cached) for count, is_cached in blocks))


def draw_pool(pool: KVCacheManager | PoolSnapshot, width: int = 64) -> str:
    """Lines of `width` characters in order of block ids, then a legend with counts. O(num_blocks).

    A large pool is drawn in at most 16 lines: a character then stands for several adjacent blocks, by what most of
    them are. Raises `InvalidArgument` for a width below 1.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    >>> seq = cache.allocate([1, 2, 3])
    >>> print(draw_pool(cache).splitlines()[0])
    ▒▒······
    """
    if width < 1:
        raise InvalidArgument(f"width is {width}; it must be at least 1")
    snapshot = pool if isinstance(pool, PoolSnapshot) else snapshot_pool(pool)
    states = snapshot.states
    scale = max(1, -(-len(states) // (width * _MAX_LINES)))
    cells = "".join(_most_common(states[start : start + scale]) for start in range(0, len(states), scale))
    lines = [cells[start : start + width] for start in range(0, len(cells), width)]
    if scale > 1:
        lines.append(f"(a character stands for {scale} blocks)")
    counts = Counter(states)
    lines += [f"{state} {counts[state]:,} {meaning}" for state, meaning in _MEANINGS.items()]
    return "\n".join(lines)


def _state(ref_count: int, is_cached: bool) -> str:
    if ref_count > 1:
        return SHARED
    if ref_count == 1:
        return HELD
    return IDLE if is_cached else FREE


def _most_common(states: str) -> str:
    return Counter(states).most_common(1)[0][0]
