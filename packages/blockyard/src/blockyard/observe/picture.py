"""Pictures of a pool in text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..answers import BlockState
from ..arguments import shown
from ..core.manager import KVCacheManager
from ..core.pools.lease_pool import LeasePool
from ..errors import InvalidArgument


def pool_of(cache: KVCacheManager | LeasePool) -> LeasePool:
    """Return the pool of a manager, or the pool itself if given one. Raises `InvalidArgument` for anything else."""
    if not isinstance(cache, (KVCacheManager, LeasePool)):
        raise InvalidArgument(f"cache is {shown(cache)}; it must be a KVCacheManager or a pool")
    return cache if isinstance(cache, LeasePool) else cache.pool


SHARED, PENDING, PRIVATE, FENCED, IDLE, FREE, RETIRING, GONE = "█▓▒◇░·▼ "
_CHARACTERS = dict(zip(BlockState, (FREE, PRIVATE, SHARED, IDLE, PENDING, RETIRING, GONE, FENCED), strict=True))
_MEANINGS = {
    SHARED: "shared: held and cached",
    PENDING: "pending: held, not computed yet; an equal prompt shares them",
    PRIVATE: "private: held, not cached",
    FENCED: "fenced: released, kept for a step in flight",
    IDLE: "idle: cached, not held",
    FREE: "free",
    RETIRING: "retiring: held beyond the end of a pool that shrank; removed when freed",
}
_ALWAYS = (SHARED, PRIVATE, IDLE, FREE)
_HELD = (SHARED, PENDING, PRIVATE, FENCED, RETIRING)
_MAX_LINES = 16


@dataclass(frozen=True, slots=True)
class GroupTokens:
    """Tokens and blocks that sequences hold in one layer group. Tokens of a shared block count once."""

    name: str
    block_size: int
    num_tokens: int
    num_blocks: int

    @property
    def num_empty_slots(self) -> int:
        """Return the slots of these blocks without a token (internal fragmentation)."""
        return self.num_blocks * self.block_size - self.num_tokens


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """State of each usable block, from block 1, as characters of the legend.

    Attributes:
        states: blocks of the pool.
        cpu_states: blocks of the CPU pool; "" without one.
        most_holders: reference count of the block that is held most often.
        groups: tokens held in each layer group.
    """

    states: str
    cpu_states: str = ""
    most_holders: int = 0
    groups: tuple[GroupTokens, ...] = ()

    @property
    def num_held(self) -> int:
        """Return the number of held blocks."""
        return sum(self.states.count(state) for state in _HELD)


def snapshot_pool(cache: KVCacheManager | LeasePool) -> PoolSnapshot:
    """Return the current state of each block, to be drawn later. O(num_blocks + held blocks)."""
    pool = pool_of(cache)
    states, most_holders = _states(pool), int(pool.ref_counts().max())
    if isinstance(cache, LeasePool):
        return PoolSnapshot(states, most_holders=most_holders)
    cpu = cache.cpu_pool
    groups = tuple(_tokens_held(cache, group) for group in range(len(cache.config.layer_groups)))
    return PoolSnapshot(states, "" if cpu is None else _states(cpu), most_holders, groups)


def draw_pool(pool: KVCacheManager | LeasePool | PoolSnapshot, width: int = 64) -> str:
    """Return a picture of the pool, a legend with counts, the tokens held, and the CPU pool.

    Blocks are drawn in order of their ids, `width` characters per line. In a pool of more than 16 lines a character
    stands for several adjacent blocks, by their most common state. O(num_blocks + held blocks). Raises
    `InvalidArgument` for a width below 1.

    >>> from blockyard import CacheConfig, KVCacheManager
    >>> cache = KVCacheManager(CacheConfig(num_blocks=9, block_size=2))
    >>> seq = cache.allocate([1, 2, 3])
    >>> picture = draw_pool(cache).splitlines()
    >>> picture[0], picture[-1]
    ('▓▒······', '3 tokens in 2 blocks of 2, empty slots: 1')
    """
    if width < 1:
        raise InvalidArgument(f"width is {width}; it must be at least 1")
    snapshot = pool if isinstance(pool, PoolSnapshot) else snapshot_pool(pool)
    lines = _draw(snapshot.states, width, snapshot.most_holders)
    lines += [_describe(group) for group in snapshot.groups if group.num_blocks > 0]
    if snapshot.cpu_states:
        lines += ["CPU pool:", *_draw(snapshot.cpu_states, width, 0)]
    return "\n".join(lines)


def _states(pool: LeasePool) -> str:
    """Return a character for each block from block 1; a blank for a block that a shrunk pool has removed."""
    return "".join([_CHARACTERS[BlockState(state)] for state in pool.states()[1:].tolist()]).rstrip(GONE)


def _tokens_held(cache: KVCacheManager, group: int) -> GroupTokens:
    """Return the tokens held in one group. A shared block counts once, for the sequence that fills most of it."""
    layers = cache.config.layer_groups[group]
    filled: dict[int, int] = {}
    for seq in cache.running():
        num_tokens = cache.num_tokens(seq)
        for place, block in enumerate(cache.block_ids(seq, group).tolist()):
            tokens = min(max(num_tokens - place * layers.block_size, 0), layers.block_size)
            if block:
                filled[block] = max(filled.get(block, 0), tokens)
    is_single = len(cache.config.layer_groups) == 1
    name = layers.name if layers.name or is_single else f"group {group}"
    return GroupTokens(name, layers.block_size, sum(filled.values()), len(filled))


def _draw(states: str, width: int, most_holders: int) -> list[str]:
    scale = max(1, -(-len(states) // (width * _MAX_LINES)))
    parts = (states[start : start + scale] for start in range(0, len(states), scale))
    cells = "".join(Counter(part).most_common(1)[0][0] for part in parts)
    lines = [cells[start : start + width] for start in range(0, len(cells), width)]
    if scale > 1:
        lines.append(f"(a character stands for {scale} blocks)")
    counts = Counter(states)
    for state, meaning in _MEANINGS.items():
        if state in _ALWAYS or counts[state]:
            lines.append(f"{state} {counts[state]:,} {meaning}")
    if most_holders > 1:
        lines.append(f"a block is held up to {most_holders:,} times")
    return lines


def _describe(group: GroupTokens) -> str:
    name = f"{group.name}: " if group.name else ""
    blocks = f"{group.num_blocks:,} blocks of {group.block_size}"
    return f"{name}{group.num_tokens:,} tokens in {blocks}, empty slots: {group.num_empty_slots:,}"
