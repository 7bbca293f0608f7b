"""Hit density: what is expected to be hit least for the time that it takes up a block goes first."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import grown_i64, zeros_i64
from ..base import EvictionPolicy
from ..parts.keys import KeyRing, mix
from ..parts.lists import BlockLists
from .return_rates import (
    END,
    MOST_SHARED,
    MOST_TURNS,
    NUM_AGES,
    NUM_CLASSES,
    ReturnRates,
    chain_class,
    class_of,
    is_end_of,
    pack,
    shared_class,
    shared_of,
    time_of,
    turn_of,
)

NUM_CELLS: Final[i64] = NUM_CLASSES * NUM_AGES
#: The list of the blocks whose chain is still being let go.
ARRIVING: Final[i64] = NUM_CELLS
#: One content in this many is followed after its eviction, at most; small pools follow more.
MOST_SAMPLED_ONE_IN: Final = 16
#: The memory has two entries a block, and in small pools this many.
FEWEST_ENTRIES: Final = 16384


class Density(EvictionPolicy):
    """Each block is worth its expected hits divided by the time it would wait for them; the least worth goes first.

    After Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018): contents are
    sorted into classes, and how often a class is hit at which age is learned while it runs. Three things are different:

    - The classes are made for prefixes (`content_class`). What one request leaves behind, a chain, shares a fate: it is
      new, or it continues a chain, for the first time or the tenth; it added little or much. What several chains have
      in common is known by how many they are.
    - Ages beyond the pool's own reach are learned too, from a sample of contents that are followed after their
      eviction (`tracked`). So the rates describe the load and not what this policy did with it.
    - The worth is Gittins' index (1979), the best ratio over all times one might keep a block, as a conversation's next
      turn does not come at once: its chance grows before it falls.

    Nothing is known at first, and then the order is that of least recent use, as it is wherever classes and ages do not
    differ clearly. About 100 bytes a block. O(1) amortised an operation, with up to 20 moves between lists a block.

    update_every: blocks freed before the worths are computed anew; 0: an eighth of the pool, at least 1024.
    """

    def __init__(self, num_blocks: int, update_every: int = 0) -> None:
        super().__init__(num_blocks)
        self._update_every = update_every
        self._lists = BlockLists(int(ARRIVING) + 1, num_blocks)
        #: 1 + the key of each block's content; 0 for none.
        self._key = zeros_i64(num_blocks)
        #: What is known of it (`content_class`); -1 for a new one.
        self._state = zeros_i64(num_blocks)
        #: Hits since it was last let go.
        self._hits = zeros_i64(num_blocks)
        self._now: i64 = 0
        self._last_depth: i64 = -1
        self._order = zeros_i64(int(NUM_CELLS))
        self._rank = zeros_i64(int(NUM_CELLS))
        #: How often the lists were sorted by worth.
        self.num_sorts: i64 = 0
        #: All lists before this rank are empty.
        self._first_rank: i64 = 0
        self._start_learning()

    def _start_learning(self) -> None:
        num_blocks = int(self.num_blocks)
        sampled_one_in = 1
        while sampled_one_in < MOST_SAMPLED_ONE_IN and num_blocks >= 2000 * sampled_one_in:
            sampled_one_in *= 2
        self._sample_mask: i64 = sampled_one_in - 1
        self._tracked = KeyRing(max(2 * num_blocks // 4 * 4, FEWEST_ENTRIES))
        self._rates = ReturnRates(num_blocks, sampled_one_in)
        #: Which entry of the memory is the first that is younger than each age.
        self._next_entry = zeros_i64(int(NUM_AGES))
        self._age_period: i64 = self._update_every or max(num_blocks // 32, 64)
        self._worth_period: i64 = self._update_every or max(num_blocks // 8, 1024)
        self._next_ageing = self._now
        self._next_worths = self._now + self._worth_period
        self._sort(self._rates.worths())

    # Told by the pool.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle. A chain is let go from its last block to its first."""
        if depth >= self._last_depth >= 0:
            self._settle()
        self._meet(block, key)
        self._lists.append(ARRIVING, block)
        self._last_depth = depth
        if depth == 0:
            self._settle()

    def _meet(self, block: i64, key: i64) -> None:
        if self._key[block] != key + 1:
            self._key[block] = key + 1
            self._hits[block] = 0
            place = self._tracked.find(key)
            self._state[block] = self._tracked.state(place) if place >= 0 else -1

    def hit(self, block: i64, key: i64) -> None:
        """One hit more."""
        self._settle_with(block)
        self._meet(block, key)
        self._hits[block] = min(self._hits[block] + 1, MOST_SHARED)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._settle_with(block)
        self._lists.remove(block)

    def _settle_with(self, block: i64) -> None:
        """If `block` is in the chain that is being let go, that chain is complete."""
        if self._lists.list_of(block) == ARRIVING:
            self._settle()

    def evict(self) -> i64:
        """Return the head of the first list in the order of worth that is not empty."""
        self._settle()
        while self._lists.length[self._order[self._first_rank]] == 0:
            self._first_rank += 1
        block = self._lists.pop(self._order[self._first_rank])
        self._key[block] = 0
        return block

    # A chain, when it is complete.

    def _settle(self) -> None:
        length = self._lists.length[ARRIVING]
        if length == 0:
            return
        reaches_root = self._last_depth == 0
        self._last_depth = -1
        added, known = self._first_known(length)
        turn: i64 = 0
        # A request that goes on where another ended continues it. To have only the first block in common is not enough.
        if known >= 0 and is_end_of(known) and (added < length - 1 or (not reaches_root and length > 1)):
            turn = min(turn_of(known) + 1, MOST_TURNS)
        self._place_chain(length, turn, chain_class(turn, added), reaches_root)
        if self._now >= self._next_ageing:
            self._grow_older()

    def _first_known(self, length: i64) -> tuple[i64, i64]:
        """Return how many blocks at the chain's end are new, and the state of the one before them, or -1."""
        block = self._lists.head(ARRIVING)
        for added in range(length):
            if self._state[block] >= 0:
                return added, self._state[block]
            block = self._lists.after(block)
        return length, -1

    def _place_chain(self, length: i64, turn: i64, chain: i64, reaches_root: bool) -> None:
        shared: i64 = 0
        for place in range(length):
            block = self._lists.pop(ARRIVING)
            is_root = reaches_root and place == length - 1
            # What a block is shared by shares all its parents.
            shared = max(self._shared(block, turn > 0 and not is_root), shared)
            kind = chain
            if shared > 0:
                kind = shared_class(shared)
            elif place == 0:
                kind = END + (1 if turn > 0 else 0)
            self._place(block, pack(self._now, kind, turn, place < 2, shared), place < 2)
        # The blocks of a chain have one age, so that a parent never seems younger than its child.
        self._now += length

    def _shared(self, block: i64, is_continued: bool) -> i64:
        """By how many requests a block is shared now; the one request that continues its chain is none of them."""
        known = self._state[block] >= 0
        before = shared_of(self._state[block]) if known else i64(0)
        uses = max(self._hits[block], i64(1) if known else i64(0))
        if is_continued and uses <= 1:
            return before
        return min(before + uses, MOST_SHARED)

    def _place(self, block: i64, state: i64, is_end: bool) -> None:
        key = self._key[block] - 1
        old = self._state[block]
        sampled = (mix(key) & self._sample_mask) == 0
        if sampled or is_end or (old >= 0 and is_end_of(old)):
            self._follow(key, old, state, sampled, is_end)
        self._state[block] = state
        self._hits[block] = 0
        self._append(class_of(state) * NUM_AGES, block)

    def _append(self, cell: i64, block: i64) -> None:
        self._lists.append(cell, block)
        self._first_rank = min(self._first_rank, self._rank[cell])

    # What is learned.

    def _follow(self, key: i64, old: i64, state: i64, sampled: bool, is_end: bool) -> None:
        """Count the return of a content that was followed, and follow it from now on."""
        place = self._tracked.find(key)
        if place >= 0:
            if sampled and old >= 0:
                self._rates.returned(class_of(old) * NUM_AGES + self._age_of_entry(self._tracked.number(place)))
            self._tracked.forget(place)
        if sampled or is_end:
            self._tracked.put(key, state)
        if sampled:
            self._rates.entered(class_of(state) * NUM_AGES)

    def _age_of_entry(self, number: i64) -> i64:
        """Return the age up to which the entry was counted."""
        age: i64 = 0
        while age < NUM_AGES - 1 and self._next_entry[age + 1] > number:
            age += 1
        return age

    def _grow_older(self) -> None:
        self._next_ageing = self._now + self._age_period
        for age in range(1, NUM_AGES):
            self._age_entries(age)
        for age in range(NUM_AGES - 2, -1, -1):
            self._age_blocks(age)
        if self._now >= self._next_worths:
            self._next_worths = self._now + self._worth_period
            self._rates.fade()
            self._sort(self._rates.worths())

    def _age_entries(self, age: i64) -> None:
        """Count the followed contents that have reached this age since the last time."""
        tracked = self._tracked
        latest = self._now - self._rates.begins[age]
        number = max(self._next_entry[age], tracked.num_put - tracked.capacity)
        while number < tracked.num_put:
            place = tracked.place(number)
            state = tracked.state(place)
            if time_of(state) > latest:
                break
            key = tracked.key(place)
            if key >= 0 and (mix(key) & self._sample_mask) == 0:
                self._rates.entered(class_of(state) * NUM_AGES + age)
            number += 1
        self._next_entry[age] = number

    def _age_blocks(self, age: i64) -> None:
        """Move the idle blocks that have outgrown this age to the lists of the next."""
        latest = self._now - self._rates.begins[age + 1]
        for cell in range(age, NUM_CELLS, NUM_AGES):
            while self._lists.length[cell] > 0:
                block = self._lists.head(cell)
                if time_of(self._state[block]) > latest:
                    break
                self._lists.remove(block)
                self._append(cell + 1, block)

    def _sort(self, worths: vec[i64]) -> None:
        """The lists in order of worth; among equals the older age first, then the lower class."""
        order = sorted((int(worths[cell]), -int(cell % NUM_AGES), int(cell)) for cell in range(NUM_CELLS))
        for rank in range(NUM_CELLS):
            cell = i64(order[rank][2])
            self._order[rank] = cell
            self._rank[cell] = rank
        self._first_rank = 0
        self.num_sorts += 1

    def clear(self) -> None:
        """No block is idle any more, and nothing is known."""
        self._lists.clear()
        self._key = zeros_i64(len(self._key))
        self._last_depth = -1
        self._start_learning()

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1. Ages are measured by the size of the pool, so learning starts again."""
        self._settle()
        key = grown_i64(self._key, num_blocks)
        state = grown_i64(self._state, num_blocks)
        hits = grown_i64(self._hits, num_blocks)
        self._lists.grow(num_blocks)
        super().grow(num_blocks)
        self._key = key
        self._state = state
        self._hits = hits
        self._start_learning()

    def check(self) -> None:
        """The lists are sound, and none that comes before the first rank has a block. O(num_blocks)."""
        self._lists.check()
        for rank in range(NUM_CELLS):
            cell = self._order[rank]
            if self._rank[cell] != rank:
                raise InvariantError(f"density: list {cell} is rank {rank} and says {self._rank[cell]}")
            if rank < self._first_rank and self._lists.length[cell] > 0:
                raise InvariantError(f"density: list {cell} of rank {rank} has blocks, before rank {self._first_rank}")
