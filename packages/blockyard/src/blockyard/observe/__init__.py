"""Reports and pictures of a cache, made from its public data.

from blockyard.observe import describe_blocks, describe_history, describe_leaks, draw_pool
"""

from .picture import GroupTokens, PoolSnapshot, draw_pool, snapshot_pool
from .report import describe_blocks, describe_history, describe_leaks

__all__ = [
    "GroupTokens",
    "PoolSnapshot",
    "describe_blocks",
    "describe_history",
    "describe_leaks",
    "draw_pool",
    "snapshot_pool",
]
