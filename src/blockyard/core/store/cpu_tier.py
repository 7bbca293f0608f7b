"""The CPU pool as a second chance: what the pool evicts is kept there for later hits."""

from mypy_extensions import i64

from ..pool.observer import PoolObserver
from .content_pool import ContentPool
from .transfers import Transfers


class CpuTier(PoolObserver):
    """Saves evicted blocks in the CPU pool, where swapped-out sequences live too and come first.

    The keys are the same content ids as in the pool, so a hit here is as exact as a hit there: salt, adapter, images
    and generation are part of it. Which block goes when the CPU pool is full is up to its own free queue.
    """

    def __init__(self, pool: ContentPool, cpu: ContentPool) -> None:
        self.pool = pool
        self.cpu = cpu
        #: Evicted blocks (block, CPU block, group) that no plan has saved yet.
        self._saves: list[int] = []

    def evicting(self, block: i64) -> None:
        """Keep what `block` holds, unless it is held twice or the CPU pool is full of sequences. O(1) expected."""
        content = self.pool.content_of(block)
        group = self.pool.group_of(block)
        if not self.pool.index.rings.is_alone(block) or self.cpu.find_content(content, group) != 0:
            return
        if self.cpu.queue.num_free == 0:
            return
        target = self.cpu.acquire_one()
        try:
            self._saves += (int(block), int(target), int(group))
        except MemoryError:  # it is not kept
            self.cpu.release_one(target)
            return
        self.cpu.cache_content(target, content, group)

    def tell(self, transfers: Transfers) -> None:
        """Hand all saves to the plan being made. Until it is complete nothing may take their places."""
        for index in range(0, len(self._saves), 3):
            transfers.swap_out(self._saves[index], self._saves[index + 1], self._saves[index + 2])
            transfers.hold(self._saves[index + 1])
        self._saves = []

    def waiting_blocks(self) -> list[int]:
        """CPU blocks held for saves that are in no plan yet."""
        return self._saves[1::3]
