"""Several policies side by side, of which the one chooses that would hit the most."""

from typing import Final

from mypy_extensions import i64

from ....arguments import require_int
from ..base import EvictionPolicy
from ..parts.keys import mix
from ..parts.lists import BlockLists
from ..simple.arc import ARC
from ..simple.heaps import LFU
from .density import Density
from .return_rates import NUM_AGES, NUM_CLASSES, class_of, time_of


class SampledCache:
    """`capacity` contents under `policy`, which is made for 2 * capacity + 1 blocks. O(cost of the policy) a content.

    Where a request has more contents than the capacity, only its first ones count.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self._slot_of: dict[int, int] = {}
        self._key_of = [0] * (2 * capacity + 1)
        self._free = list(range(2 * capacity, 0, -1))

    def request(self, keys: list[int]) -> int:
        """Return a request for `keys`, first to last; how many of them it hits before the first that is missing."""
        keys = keys[: self.capacity]
        hits = 0
        is_leading = True
        for key in keys:
            slot = self._slot_of.get(key, 0)
            if slot == 0:
                is_leading = False
                slot = self._free.pop()
                self._slot_of[key] = slot
                self._key_of[slot] = key
            else:
                hits += 1 if is_leading else 0
                self.policy.hit(i64(slot), i64(key))
                self.policy.remove(i64(slot))
        for place in range(len(keys) - 1, -1, -1):
            self.policy.insert(i64(self._slot_of[keys[place]]), i64(keys[place]), place)
        while len(self._slot_of) > self.capacity:
            self._evict()
        return hits

    def _evict(self) -> None:
        slot = int(self.policy.evict())
        del self._slot_of[self._key_of[slot]]
        self._free.append(slot)


class BorrowedDensity(EvictionPolicy):
    """Density for a sample, which cannot know chains: classes, clock and the order of worth are those of `real`.

    states: of the contents of the request that runs, by key. O(1) amortised, with up to 20 moves a content.
    """

    def __init__(self, real: Density, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.real = real
        self.states: dict[int, i64] = {}
        self._lists = BlockLists(int(NUM_CLASSES * NUM_AGES), num_blocks)
        self._time: list[i64] = [0] * num_blocks
        self._first_rank: i64 = 0
        self._num_sorts: i64 = 0
        self._next_ageing: i64 = 0

    def insert(self, block: i64, key: i64, depth: i64) -> None:  # noqa: ARG002
        """`block` became idle, with the class that `real` gave its content."""
        state = self.states[int(key)]
        self._time[block] = time_of(state)
        self._append(class_of(state) * NUM_AGES, block)

    def _append(self, cell: i64, block: i64) -> None:
        self._lists.append(cell, block)
        self._first_rank = min(self._first_rank, self.real.rank_of(cell))

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._lists.remove(block)

    def evict(self) -> i64:
        """Return the head of the first list in the order of worth that is not empty."""
        self._grow_older()
        if self._num_sorts != self.real.num_sorts:
            self._num_sorts = self.real.num_sorts
            self._first_rank = 0
        while self._lists.length[self.real.cell_of(self._first_rank)] == 0:
            self._first_rank += 1
        return self._lists.pop(self.real.cell_of(self._first_rank))

    def _grow_older(self) -> None:
        """Move what has outgrown its age to the next list, now and then."""
        now = self.real.now
        if now < self._next_ageing:
            return
        self._next_ageing = now + max(self.real.num_blocks >> 5, 64)
        for age in range(NUM_AGES - 2, -1, -1):
            latest = now - self.real.age_begins(age + 1)
            for kind in range(NUM_CLASSES):
                self._age(kind * NUM_AGES + age, latest)

    def _age(self, cell: i64, latest: i64) -> None:
        while self._lists.length[cell] > 0:
            block = self._lists.head(cell)
            if self._time[block] > latest:
                break
            self._lists.remove(block)
            self._append(cell + 1, block)

    def check(self) -> None:
        """The lists are sound. O(num_blocks)."""
        self._lists.check()


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
    capacity. It has no floor.

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
        """Return the name of the policy that chooses now."""
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
        """Return the choice of the member that leads."""
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
