"""Looking at a cache from outside, through its public data alone.

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
