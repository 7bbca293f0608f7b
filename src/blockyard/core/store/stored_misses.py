"""Evictions below token blocks, for the log of misses."""

from mypy_extensions import i64

from ...ids import NO_CONTENT
from ..pool.observer import PoolObserver
from ..watch.misses import MissLog, stored_name
from .content_pool import ContentPool


class StoredMisses(PoolObserver):
    """Tells a `MissLog` what leaves a pool whose blocks are known by their content.

    The token blocks stay, so a prompt's tokens are found and its keys and values are not.
    """

    def __init__(self, log: MissLog, pool: ContentPool) -> None:
        self.log = log
        self.pool = pool

    def evicting(self, block: i64) -> None:
        """Remember the content of `block`. O(1)."""
        self.log.remember(stored_name(self.pool.content_of(block)), NO_CONTENT)
