"""What these tools look at: a manager, or a pool that is used alone."""

from __future__ import annotations

from ..arguments import shown
from ..core.block_pool import BlockPool
from ..core.manager import KVCacheManager
from ..errors import InvalidArgument


def pool_of(cache: KVCacheManager | BlockPool) -> BlockPool:
    """The pool of a manager, or the one that was given. Raises `InvalidArgument` for anything else."""
    if not isinstance(cache, (KVCacheManager, BlockPool)):
        raise InvalidArgument(f"cache is {shown(cache)}; it must be a KVCacheManager or a BlockPool")
    return cache if isinstance(cache, BlockPool) else cache.pool
