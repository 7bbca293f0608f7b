"""Looking at a cache from outside, through its public data alone.

from blockyard.observe import draw_pool
"""

from .picture import PoolSnapshot, draw_pool, snapshot_pool

__all__ = ["PoolSnapshot", "draw_pool", "snapshot_pool"]
