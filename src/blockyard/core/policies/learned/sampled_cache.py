"""A small cache of keys alone that runs a policy on a sample of all contents: what it would hit."""

from mypy_extensions import i64

from ..base import EvictionPolicy
from ..parts.lists import BlockLists
from .content_class import NUM_CLASSES, class_of, time_of
from .density import Density
from .return_rates import NUM_AGES


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
        """A request for `keys`, first to last; how many of them it hits before the first that is missing."""
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
        """The head of the first list in the order of worth that is not empty."""
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
