"""Whether a pool or cache takes calls now: asked of several before the first of them is changed."""

from __future__ import annotations

from ..core.block_pool import BlockPool


def require_idle(pool: BlockPool) -> None:
    """Raise `ConcurrentCall` while a call of the pool, or of its manager, runs. O(1)."""
    pool.free_blocks(pool.get_new_blocks(0))
