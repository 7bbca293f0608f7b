"""Several policies side by side, of which the one chooses that would hit the most."""

from typing import Final

from mypy_extensions import i64

from ....arguments import require_int
from ..base import EvictionPolicy
from ..parts.keys import mix
from ..simple.arc import ARC
from ..simple.heaps import LFU
from .density import Density
from .sampled_cache import BorrowedDensity, SampledCache

#: One content in this many is sampled, at most; small pools sample more.
MOST_SAMPLED_ONE_IN: Final = 8
FEWEST_SAMPLED: Final = 512
#: The scores forget with half of this many times the capacity, and of this many references at least.
HALF_LIFE: Final = 16
SMALLEST_UNIT: Final = 2000
#: 2**20 * (1 - 2**(-1 / 64)): what is forgotten in a quarter of the unit.
FORGOTTEN: Final[i64] = 11295


class Auto(EvictionPolicy):
    """`density`, `lfu` and `arc` all keep their order of the idle blocks; the one that leads chooses.

    Who leads is learned from three small caches of keys alone, one for each, that run a sample of all contents: those
    whose key has a certain hash. From a sample only differences between policies may be read, since contents that
    nearly every prompt has are in it or not. A policy takes the lead when its hits of late are more by a fifth of the
    capacity. It has no floor: use it as "guarded:auto" or "strict:auto".

    The cost of all members, and that of the sample; about 230 bytes a block and lfu's counts. seed: of the sample.
    """

    def __init__(self, num_blocks: int, seed: object = 0) -> None:
        super().__init__(num_blocks)
        self._seed: i64 = require_int("seed", seed, 0, 2**31 - 1)
        self._density = Density(num_blocks, eager=True)
        self._members: list[EvictionPolicy] = [self._density, LFU(num_blocks), ARC(num_blocks)]
        self._start()

    def _start(self) -> None:
        num_blocks = int(self.num_blocks)
        self._one_in: i64 = 1
        while self._one_in < MOST_SAMPLED_ONE_IN and num_blocks >= 2 * self._one_in * FEWEST_SAMPLED:
            self._one_in *= 2
        capacity = max(num_blocks // int(self._one_in), 1)
        ids = 2 * capacity + 1
        self._borrowed = BorrowedDensity(self._density, ids)
        self._samples = [SampledCache(policy, capacity) for policy in (self._borrowed, LFU(ids), ARC(ids))]
        self._scores: list[i64] = [0, 0, 0]
        self._leader = 0
        #: The chain that is being let go: its sampled blocks and their keys, last to first.
        self._blocks: list[int] = []
        self._keys: list[int] = []
        self._last_depth: i64 = -1
        self._num_references: i64 = 0
        self._next_forgetting: i64 = 0

    @property
    def leader(self) -> str:
        """The name of the policy that chooses now."""
        return ("density", "lfu", "arc")[self._leader]

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle. A chain is let go from its last block to its first."""
        if depth >= self._last_depth >= 0:
            self._settle()
        for member in self._members:
            member.insert(block, key, depth)
        self._num_references += 1
        self._last_depth = depth
        if (mix(key ^ self._seed) >> 8) & (self._one_in - 1) == 0:
            self._blocks.append(int(block))
            self._keys.append(int(key))
        if depth == 0:
            self._settle()

    def _settle(self) -> None:
        """The chain is complete: it was one request, as far as others do not hold its blocks."""
        self._last_depth = -1
        if not self._keys:
            return
        self._density.settle()
        self._borrowed.states = {
            key: self._density.state_of(i64(block)) for key, block in zip(self._keys, self._blocks, strict=True)
        }
        keys = list(self._borrowed.states)[::-1]
        for number in range(len(self._samples)):
            self._scores[number] += self._one_in * self._samples[number].request(keys)
        self._blocks = []
        self._keys = []
        self._choose_leader()

    def _choose_leader(self) -> None:
        unit = max(self.num_blocks, SMALLEST_UNIT)
        while self._num_references >= self._next_forgetting:
            self._next_forgetting += max(unit // 4, 1)
            for number in range(len(self._scores)):
                self._scores[number] -= (self._scores[number] * FORGOTTEN) >> 20
        for number in range(len(self._scores)):
            if 5 * (self._scores[number] - self._scores[self._leader]) > self.num_blocks:
                self._leader = number

    def hit(self, block: i64, key: i64) -> None:
        """A prompt hit `block`."""
        self._settle()
        for member in self._members:
            member.hit(block, key)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._settle()
        for member in self._members:
            member.remove(block)

    def evict(self) -> i64:
        """The choice of the member that leads."""
        self._settle()
        block = self._members[self._leader].evict()
        for number in range(len(self._members)):
            if number != self._leader:
                self._members[number].remove(block)
        return block

    def clear(self) -> None:
        """No block is idle any more, and nothing is known."""
        for member in self._members:
            member.clear()
        self._start()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1; who leads is learned anew."""
        self._settle()
        for member in self._members:
            member.grow(num_blocks)
        super().grow(num_blocks)
        self._start()

    def check(self) -> None:
        """All members are sound, and the samples'. O(num_blocks)."""
        for member in self._members:
            member.check()
        for sample in self._samples:
            sample.policy.check()
