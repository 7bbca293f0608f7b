"""The density policy once more, slow and obvious: a list of everything that was ever let go, and `min`.

It follows every content, as a pool of less than 2,000 blocks does, and keeps no lists by worth: it looks at all idle
blocks. Which of them are how old is decided at the same moments as in the policy, every `update_every` blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .policy_models import Model

Block = int
Key = int

NUM_AGES = 20
#: Classes 0 to 3: new chains, 4 to 9: continued ones; 10 and 11: their last blocks; 12 to 19: shared blocks.
GROUPS = ((0, 10), (10, 12), (12, 20))


@dataclass
class Fate:
    """The last release of a content, as number `serial` of all releases that were followed."""

    time: int
    kind: int
    turn: int
    is_end: bool
    shared: int
    serial: int = 0
    age: int = 0


class DensityModel(Model):
    """Lists, dicts and `min`; the arithmetic is the policy's, whole numbers throughout."""

    def __init__(self, num_blocks: int, update_every: int = 0) -> None:
        super().__init__(num_blocks)
        #: What is assumed until this many contents were observed, in 256ths.
        self.class_prior, self.age_prior = 512000, 256000
        self.update_every = update_every
        self.now = 0
        self.known: dict[Block, Fate | None] = {}
        self.hits: Counter[Block] = Counter()
        self.arriving: list[tuple[Block, int]] = []
        #: Of each idle block, the age it was last found to have, and when it entered that list.
        self.age: dict[Block, int] = {}
        self.entered_list: dict[Block, int] = {}
        self.moves = 0
        self._start()

    def _start(self) -> None:
        n = self.num_blocks
        fifths = (128, 169, 223, 294, 388)
        unit = max(n, 1024)
        self.begins = [0] + [unit * 4 ** (age // 5) * fifths[age % 5] // 2048 for age in range(1, NUM_AGES + 1)]
        self.followed: dict[Key, Fate] = {}
        self.entered: Counter[tuple[int, int]] = Counter()
        self.returned: Counter[tuple[int, int]] = Counter()
        self.next_ageing = self.now
        self.next_worths = self.now + (self.update_every or max(n // 8, 1024))
        self._value()

    def insert(self, block: Block, key: Key, depth: int) -> None:
        if self.arriving and depth >= self.arriving[-1][1]:
            self._settle()
        self._meet(block, key)
        self.idle.append(block)
        self.arriving.append((block, depth))
        if depth == 0:
            self._settle()

    def _meet(self, block: Block, key: Key) -> None:
        if self.content.get(block) != key:
            self.content[block] = key
            self.hits[block] = 0
            self.known[block] = self.followed.get(key)

    def hit(self, block: Block, key: Key) -> None:
        self._settle_with(block)
        self._meet(block, key)
        self.hits[block] += 1

    def remove(self, block: Block) -> None:
        self._settle_with(block)
        self.idle.remove(block)

    def _settle_with(self, block: Block) -> None:
        if any(block == other for other, _ in self.arriving):
            self._settle()

    def victim(self) -> Block:
        self._settle()
        return min(self.idle, key=self._rank)

    def _rank(self, block: Block) -> tuple[int, int, int, int]:
        fate = self.known[block]
        assert fate is not None
        age = self.age[block]
        return self.worth[fate.kind, age], -age, fate.kind, self.entered_list[block]

    def _settle(self) -> None:
        chain, self.arriving = self.arriving, []
        if not chain:
            return
        whole = chain[-1][1] == 0
        length = len(chain)
        states = [self.known[block] for block, _ in chain]
        added = next((place for place, state in enumerate(states) if state), length)
        state = states[added] if added < length else None
        only_the_root = length == 1 or (whole and added == length - 1)
        turn = min(state.turn + 1, 3) if state and state.is_end and not only_the_root else 0
        kind = 2 + 2 * turn + (added > 4) if turn else (added > 1) + (added > 4) + (added >= 32)
        shared = 0
        for place, (block, _) in enumerate(chain):
            is_root = whole and place == length - 1
            shared = max(shared, self._shared(block, turn > 0 and not is_root))
            own = 11 + shared.bit_length() if shared else 10 + (turn > 0) if place == 0 else kind
            self._place(block, Fate(self.now, own, turn, place < 2, shared))
        self.now += length
        if self.now >= self.next_ageing:
            self._grow_older()

    def _shared(self, block: Block, is_continued: bool) -> int:
        state = self.known[block]
        uses = max(self.hits[block], 1 if state else 0)
        before = state.shared if state else 0
        return before if is_continued and uses <= 1 else min(before + uses, 255)

    def _place(self, block: Block, fate: Fate) -> None:
        key = self.content[block]
        old = self.followed.get(key)
        before = self.known[block]
        if old and before:
            self.returned[before.kind, old.age] += 256
        self.followed[key] = fate
        self.entered[fate.kind, 0] += 256
        self.known[block] = fate
        self.hits[block] = 0
        self._move(block, 0)

    def _move(self, block: Block, age: int) -> None:
        self.moves += 1
        self.age[block] = age
        self.entered_list[block] = self.moves

    def _grow_older(self) -> None:
        period = self.update_every or max(self.num_blocks // 32, 64)
        self.next_ageing = self.now + period
        for fate in self.followed.values():
            while fate.age < NUM_AGES - 1 and self.now - fate.time >= self.begins[fate.age + 1]:
                fate.age += 1
                self.entered[fate.kind, fate.age] += 256
        for age in range(NUM_AGES - 2, -1, -1):
            there = [block for block in self.idle if self.age[block] == age]
            for block in sorted(there, key=lambda block: self.entered_list[block]):
                fate_of = self.known[block]
                assert fate_of is not None
                if self.now - fate_of.time >= self.begins[age + 1]:
                    self._move(block, age + 1)
        if self.now >= self.next_worths:
            self.next_worths = self.now + (self.update_every or max(self.num_blocks // 8, 1024))
            for counts in (self.entered, self.returned):
                for cell in counts:
                    counts[cell] -= counts[cell] // 256
            self._value()

    def _value(self) -> None:
        self.worth: dict[tuple[int, int], int] = {}
        for first, end in GROUPS:
            assumed = [0]
            for age in range(NUM_AGES):
                entered = sum(self.entered[kind, age] for kind in range(first, end))
                returned = sum(self.returned[kind, age] for kind in range(first, end))
                assumed.append((returned * 2**20 + self.age_prior * assumed[-1]) // (entered + self.age_prior))
            for kind in range(first, end):
                chances = [
                    min(
                        (self.returned[kind, age] * 2**20 + self.class_prior * assumed[age + 1])
                        // (self.entered[kind, age] + self.class_prior),
                        2**20,
                    )
                    for age in range(NUM_AGES)
                ]
                for age in range(NUM_AGES):
                    self.worth[kind, age] = self._index(chances, age)
        for age in range(NUM_AGES):
            for kind, ends in ((range(4), 10), (range(4, 10), 11)):
                self.worth[ends, age] = min(self.worth[ends, age], *(self.worth[other, age] for other in kind))
            self.worth[12, age] = max(self.worth[other, age] for other in (*range(10), 12))
            for shared in range(13, 20):
                self.worth[shared, age] = max(self.worth[shared, age], self.worth[shared - 1, age])
        self.worth = {cell: self._step(worth) for cell, worth in self.worth.items()}

    def _index(self, chances: list[int], first: int) -> int:
        there, hits, time, ratios = 2**20, 0, 0, []
        for age in range(first, NUM_AGES):
            length, chance = self.begins[age + 1] - self.begins[age], chances[age]
            if age == first:
                length, chance = (length + 1) // 2, chance // 2
            hit = there * chance // 2**20
            hits += hit
            time += (there - hit // 2) * length // 64
            there -= hit
            ratios.append(hits * 2**40 // (time + 1))
        return max(0, *ratios)

    def _step(self, worth: int) -> int:
        octave = max(worth.bit_length() - 2, 0)
        return 2 * octave + (worth >> octave)

    def clear(self) -> None:
        super().clear()
        self.arriving = []
        self._start()

    def grow(self, num_blocks: int) -> None:
        self._settle()
        super().grow(num_blocks)
        self._start()
