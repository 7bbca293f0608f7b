"""The hit density policy: evicts the block with the fewest expected hits for the time it takes up space."""

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
#: The list of blocks whose chain is still being freed.
ARRIVING: Final[i64] = NUM_CELLS
#: At least one content in this many is tracked after its eviction; small pools track more.
MOST_SAMPLED_ONE_IN: Final = 16
#: The ring has two entries per block, but at least this many.
FEWEST_ENTRIES: Final = 16384


class Density(EvictionPolicy):
    """Evicts the block with the lowest worth: its expected hits divided by the time it would wait for them.

    After Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018): contents are
    sorted into classes, and the policy learns how often each class is hit at each age. There are three differences:

    - Classes are made for prefixes (`chain_class`). The blocks that one request leaves, a chain, are used again
      together. A chain is classified by how often it was continued (never, once, ten times) and by the number of blocks
      that were added last. Blocks that several chains share are classified by the number of chains.
    - Ages that blocks do not reach in the pool are learned too, from a sample of contents that are tracked after their
      eviction (`_tracked`). So the rates describe the load, and not the effect of this policy on it.
    - The worth is Gittins' index (1979), the best ratio over all times for which a block could be kept. The next turn
      of a conversation takes a while, so its chance first rises and then falls.

    At first, and as long as classes and ages do not differ clearly, the order is least recently used. About 100 bytes a
    block. O(1) amortised per operation, with up to 20 moves between lists per block.

    Args:
        num_blocks: blocks of the pool.
        update_every: blocks freed between two updates of the worths; 0 for an eighth of the pool, at least 1024.
    """

    def __init__(self, num_blocks: int, update_every: int = 0) -> None:
        super().__init__(num_blocks)
        self._update_every = update_every
        self._lists = BlockLists(int(ARRIVING) + 1, num_blocks)
        #: 1 + the key of each block's content; 0 for none.
        self._key = zeros_i64(num_blocks)
        #: The packed state of the content (`pack`); -1 for a new one.
        self._state = zeros_i64(num_blocks)
        #: Hits since the content was last freed.
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
        #: By age, the first entry of the ring that is younger.
        self._next_entry = zeros_i64(int(NUM_AGES))
        self._age_period: i64 = self._update_every or max(num_blocks // 32, 64)
        self._worth_period: i64 = self._update_every or max(num_blocks // 8, 1024)
        self._next_ageing = self._now
        self._next_worths = self._now + self._worth_period
        self._sort(self._rates.worths())

    # Calls of the pool.

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """Insert an idle block. The blocks of a chain are freed from last to first."""
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
        self._settle_with(block)
        self._meet(block, key)
        self._hits[block] = min(self._hits[block] + 1, MOST_SHARED)

    def remove(self, block: i64) -> None:
        self._settle_with(block)
        self._lists.remove(block)

    def _settle_with(self, block: i64) -> None:
        """Complete the chain that is being freed if `block` belongs to it."""
        if self._lists.list_of(block) == ARRIVING:
            self._settle()

    def evict(self) -> i64:
        """Evict the head of the first list that is not empty, in order of worth."""
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
        # A request that begins with all of another one continues it. A common first block is not enough.
        if known >= 0 and is_end_of(known) and (added < length - 1 or (not reaches_root and length > 1)):
            turn = min(turn_of(known) + 1, MOST_TURNS)
        self._place_chain(length, turn, chain_class(turn, added), reaches_root)
        if self._now >= self._next_ageing:
            self._grow_older()

    def _first_known(self, length: i64) -> tuple[i64, i64]:
        """Return how many blocks at the end of the chain are new, and the state of the block before them, or -1."""
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
            # Requests that share a block share all of its parents too.
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
        """Return how many requests share a block now, not counting the one that continues its chain."""
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

    # Learning.

    def _follow(self, key: i64, old: i64, state: i64, sampled: bool, is_end: bool) -> None:
        """Count the return of a tracked content, and track it again from now on."""
        place = self._tracked.find(key)
        if place >= 0:
            if sampled and old >= 0:
                self._rates.count_return(class_of(old) * NUM_AGES + self._age_of_entry(self._tracked.number(place)))
            self._tracked.forget(place)
        if sampled or is_end:
            self._tracked.put(key, state)
        if sampled:
            self._rates.count_entry(class_of(state) * NUM_AGES)

    def _age_of_entry(self, number: i64) -> i64:
        """Return the last age at which the entry was counted."""
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
        """Count the tracked contents that have reached this age since the last call."""
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
                self._rates.count_entry(class_of(state) * NUM_AGES + age)
            number += 1
        self._next_entry[age] = number

    def _age_blocks(self, age: i64) -> None:
        """Move the idle blocks that are older than this age to the lists of the next age."""
        latest = self._now - self._rates.begins[age + 1]
        for cell in range(age, NUM_CELLS, NUM_AGES):
            while self._lists.length[cell] > 0:
                block = self._lists.head(cell)
                if time_of(self._state[block]) > latest:
                    break
                self._lists.remove(block)
                self._append(cell + 1, block)

    def _sort(self, worths: vec[i64]) -> None:
        """Sort the lists by worth; of equal ones, older ages come first, then lower classes."""
        order = sorted((int(worths[cell]), -int(cell % NUM_AGES), int(cell)) for cell in range(NUM_CELLS))
        for rank in range(NUM_CELLS):
            cell = i64(order[rank][2])
            self._order[rank] = cell
            self._rank[cell] = rank
        self._first_rank = 0
        self.num_sorts += 1

    def clear(self) -> None:
        self._lists.clear()
        self._key = zeros_i64(len(self._key))
        self._last_depth = -1
        self._start_learning()

    def grow(self, num_blocks: int) -> None:
        """Make room for ids up to num_blocks - 1. Ages are measured in pool sizes, so learning starts again."""
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
        """Raise `InvariantError` unless the lists are sound and all before the first rank are empty. O(num_blocks)."""
        self._lists.check()
        for rank in range(NUM_CELLS):
            cell = self._order[rank]
            if self._rank[cell] != rank:
                raise InvariantError(
                    f"density: list {cell} is at rank {rank}, but its entry has rank {self._rank[cell]}"
                )
            if rank < self._first_rank and self._lists.length[cell] > 0:
                raise InvariantError(
                    f"density: list {cell} of rank {rank} has blocks, but the first rank with blocks is "
                    f"{self._first_rank}"
                )
