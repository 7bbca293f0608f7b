"""What a batch of prompts hits, held while an eviction policy is asked for victims."""

from mypy_extensions import i64

from ..index.hit import Hit
from ..store.base import Store


class HeldHits:
    """Holds what lookups find, block after block, until `release` frees all of it, or `undo` puts it back."""

    def __init__(self, store: Store) -> None:
        self.pool = store.kv_pool
        self.cpu_pool = store.cpu_pool
        self.store = store
        #: Of the held blocks, those that were idle: they are not counted as allocated and freed.
        self.num_revived: i64 = 0
        self.num_revived_on_cpu: i64 = 0
        self._held: list[int] = []
        self._held_on_cpu: list[int] = []

    def hold(self, hit: Hit) -> i64:
        """Hold what can be taken of a hit. Returns how many of its blocks were idle."""
        idle: i64 = 0
        for block in self.store.taken_by(hit):
            if block > 0:
                if self.pool.ref_cnt[i64(block)] == 0:
                    idle += 1
                    self.num_revived += 1
                self.pool.share_one(block)
                self._held.append(block)
            elif self.cpu_pool is not None:
                if self.cpu_pool.ref_cnt[i64(-block)] == 0:
                    self.num_revived_on_cpu += 1
                self.cpu_pool.share_one(-block)
                self._held_on_cpu.append(-block)
        return idle

    def num_distinct(self) -> int:
        """Different blocks of the pool that are held."""
        return len(set(self._held))

    def release(self) -> None:
        """Free all, the last first; the counters are as if nothing had been held."""
        for block in reversed(self._held):
            self.pool.release_one(block)
        if self.cpu_pool is not None:
            for block in reversed(self._held_on_cpu):
                self.cpu_pool.release_one(block)
            self.cpu_pool.num_allocated_blocks -= self.num_revived_on_cpu
            self.cpu_pool.num_freed_blocks -= self.num_revived_on_cpu
        self.pool.num_allocated_blocks -= self.num_revived
        self.pool.num_freed_blocks -= self.num_revived

    def undo(self) -> None:
        """Put every block back where it was in the queue, if no other was taken since."""
        for block in reversed(self._held):
            self.pool.unshare_one(block)
        if self.cpu_pool is not None:
            for block in reversed(self._held_on_cpu):
                self.cpu_pool.unshare_one(block)
