"""How long blocks live, lie idle and wait to be used again, from a sample of them."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import Histogram, Residency
from ..pool.observer import Clock, PoolObserver

#: Buckets end at 2**-10, 2**-9 … 2**20 units of time.
NUM_BUCKETS: Final = 32
FIRST_BOUND: Final = 2.0**-10


class Durations:
    """A histogram over powers of two."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_BUCKETS
        self.total = 0.0

    def add(self, duration: float) -> None:
        """Count one duration. O(log range)."""
        bound = FIRST_BOUND
        bucket = 0
        while duration > bound and bucket < NUM_BUCKETS - 1:
            bound *= 2
            bucket += 1
        self.counts[bucket] += 1
        self.total += duration

    def histogram(self) -> Histogram:
        """What was counted, as people see it."""
        bounds = [FIRST_BOUND * 2.0**bucket for bucket in range(NUM_BUCKETS - 1)]
        return Histogram(tuple(bounds), tuple(self.counts), self.total)


class ResidencySampler(PoolObserver):
    """Follows every `sample`-th block id. The three quantities are vLLM's (KV cache residency metrics):

    lifetime, from being taken to being evicted; idle before eviction, from the last use to it; reuse gap, from one
    use to the next. Time is the clock's. Costs a division for each block that a pool touches.
    """

    def __init__(self, sample: int, clock: Clock) -> None:
        self.sample: i64 = sample
        self.clock = clock
        self._born: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self.lifetime = Durations()
        self.idle = Durations()
        self.reuse_gap = Durations()

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """A life begins."""
        for index in range(start, start + count):
            if i64(blocks[index]) % self.sample == 0:
                self._born[int(blocks[index])] = self.clock.now
                self._used[int(blocks[index])] = self.clock.now

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """A block is used again."""
        for index in range(start, start + count):
            if i64(blocks[index]) % self.sample == 0:
                block = int(blocks[index])
                self.reuse_gap.add(self.clock.now - self._used.get(block, self.clock.now))
                self._used[block] = self.clock.now

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """It was in use until now."""
        for index in range(start, start + count):
            if i64(blocks[index]) % self.sample == 0:
                self._used[int(blocks[index])] = self.clock.now

    def evicting(self, block: i64) -> None:
        """A life ends."""
        if block % self.sample == 0:
            self.lifetime.add(self.clock.now - self._born.get(int(block), self.clock.now))
            self.idle.add(self.clock.now - self._used.get(int(block), self.clock.now))

    def residency(self) -> Residency:
        """The three histograms."""
        return Residency(int(self.sample), self.lifetime.histogram(), self.idle.histogram(), self.reuse_gap.histogram())
