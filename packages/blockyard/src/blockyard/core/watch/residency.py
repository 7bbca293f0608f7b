"""Samples of how long blocks live, stay idle, and wait until they are used again."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...answers import Histogram, Residency
from ..arrays import grown_float, zeros_float, zeros_i64
from ..blocks.observer import Clock, PoolObserver

#: Buckets end at 2**-10, 2**-9 … 2**20 units of time.
NUM_BUCKETS: Final = 32
FIRST_BOUND: Final = 2.0**-10


class Durations:
    """A histogram with buckets of powers of two."""

    def __init__(self) -> None:
        self.counts = zeros_i64(NUM_BUCKETS)
        self.total = 0.0

    def add(self, duration: float) -> None:
        """Count a duration. O(log range)."""
        bound = FIRST_BOUND
        bucket: i64 = 0
        while duration > bound and bucket < NUM_BUCKETS - 1:
            bound *= 2
            bucket += 1
        self.counts[bucket] += 1
        self.total += duration

    def histogram(self) -> Histogram:
        """Return the counts as a `Histogram`."""
        bounds = [FIRST_BOUND * 2.0**bucket for bucket in range(NUM_BUCKETS - 1)]
        return Histogram(tuple(bounds), tuple(int(count) for count in self.counts), self.total)


class ResidencySampler(PoolObserver):
    """Samples every `sample`-th block id for vLLM's KV cache residency metrics.

    These are the lifetime (from allocation to eviction), the idle time before eviction (from the last use), and the
    reuse gap (between two uses), by the cache's clock. A block that the pool touches costs a division, a sampled one 16
    bytes.
    """

    def __init__(self, sample: int, clock: Clock, num_blocks: int) -> None:
        self.sample: i64 = sample
        self.clock = clock
        #: Times when block `place * sample` was allocated and last used.
        self._born = zeros_float(num_blocks // sample + 1)
        self._used = zeros_float(num_blocks // sample + 1)
        self.lifetime = Durations()
        self.idle = Durations()
        self.reuse_gap = Durations()

    def on_acquire(self, blocks: vec[i32], start: i64, count: i64) -> None:
        now = self.clock.now
        sample = self.sample
        for index in range(start, start + count):
            block = i64(blocks[index])
            if block % sample == 0:
                place = block // sample
                if place >= len(self._born):
                    self._grow(place)
                self._born[place] = now
                self._used[place] = now

    def make_room(self, num_blocks: int) -> None:
        """Sample ids up to `num_blocks - 1`. Some of these may be used before they are next allocated."""
        place = i64(num_blocks) // self.sample
        if place >= len(self._born):
            self._grow(place)

    def _grow(self, place: i64) -> None:
        """Double the arrays for a pool that has grown beyond them."""
        length = int(max(2 * i64(len(self._born)), place + 1))
        born = grown_float(self._born, length)
        self._used = grown_float(self._used, length)
        self._born = born

    def on_share(self, blocks: vec[i32], start: i64, count: i64) -> None:
        now = self.clock.now
        sample = self.sample
        used = self._used
        for index in range(start, start + count):
            block = i64(blocks[index])
            if block % sample == 0:
                self.reuse_gap.add(now - used[block // sample])
                used[block // sample] = now

    def on_release(self, blocks: vec[i32], start: i64, count: i64) -> None:
        now = self.clock.now
        sample = self.sample
        used = self._used
        for index in range(start, start + count):
            block = i64(blocks[index])
            if block % sample == 0:
                used[block // sample] = now

    def on_evict(self, block: i64) -> None:
        if block % self.sample == 0:
            place = block // self.sample
            self.lifetime.add(self.clock.now - self._born[place])
            self.idle.add(self.clock.now - self._used[place])

    def residency(self) -> Residency:
        """Return the three histograms."""
        return Residency(int(self.sample), self.lifetime.histogram(), self.idle.histogram(), self.reuse_gap.histogram())
