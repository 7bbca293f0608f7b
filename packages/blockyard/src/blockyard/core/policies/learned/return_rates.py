"""Rates at which contents of each class are used again, by age, and the resulting worth of a block."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ...arrays import zeros_i64

#: Classes of contents that are likely to be used again at the same rate. A chain is the blocks that a request leaves.
#: New chains, by the blocks they added: up to 1, up to 4, fewer than 32, more.
NEW: Final[i64] = 0
#: Chains that continue a chain, by how often that happened (once, twice, more) and by the blocks added (up to 4, more).
CONTINUED: Final[i64] = 4
#: The last block of a new chain and of a continued one: often a block that the next request will cut differently.
END: Final[i64] = 10
#: Contents after which chains diverge, by the number of requests that did so: 1, 2 or 3, up to 7, ... 128 and more.
SHARED: Final[i64] = 12
NUM_CLASSES: Final[i64] = 20

#: At most this many continuations are distinguished, and this many requests that share a content counted.
MOST_TURNS: Final[i64] = 3
MOST_SHARED: Final[i64] = 255


def pack(time: i64, kind: i64, turn: i64, is_end: bool, shared: i64) -> i64:
    """Pack the state of a content into an integer.

    Args:
        time: number of blocks freed before it was freed last; below 2**46.
        kind: its class.
        turn: how often its chain was continued, 0 to 3.
        is_end: whether it is one of the last two of its chain.
        shared: how many requests used it and then diverged, 0 to 255.
    """
    return (((time * 32 + kind) * 4 + turn) * 2 + (i64(1) if is_end else i64(0))) * 256 + shared


def time_of(state: i64) -> i64:
    """Return when the content was last freed, as the number of blocks freed before it."""
    return state >> 16


def class_of(state: i64) -> i64:
    """Return the class, below `NUM_CLASSES`."""
    return (state >> 11) & 31


def turn_of(state: i64) -> i64:
    """Return how often the chain had been continued, at most 3."""
    return (state >> 9) & 3


def is_end_of(state: i64) -> bool:
    """Return whether the content was one of the last two of its chain."""
    return (state & 256) != 0


def shared_of(state: i64) -> i64:
    """Return how many requests used the content and then diverged, at most 255."""
    return state & 255


def chain_class(turn: i64, added: i64) -> i64:
    """Return the class of a chain that was continued `turn` times and added this many blocks last."""
    if turn > 0:
        return CONTINUED + 2 * (turn - 1) + (1 if added > 4 else 0)
    if added <= 1:
        return NEW
    if added <= 4:
        return NEW + 1
    return NEW + (2 if added < 32 else 3)


def shared_class(shared: i64) -> i64:
    """Return the class of a content that `shared` requests (at least 1) have in common."""
    kind = SHARED
    while shared > 1:
        shared >>= 1
        kind += 1
    return kind


#: Ages from num_blocks / 16 to 16 num_blocks, five for each factor of 4. An age is the number of blocks freed since.
NUM_AGES: Final[i64] = 20
#: Smaller pools have the ages of this one: differences shorter than a request are meaningless.
SMALLEST_POOL: Final = 1024
#: 128 times 4 ** (1 / 5), 4 ** (2 / 5), ...
FIFTHS: Final = (128, 169, 223, 294, 388)
#: Probabilities are integers, so that every machine computes the same ones.
ONE: Final[i64] = 2**20
#: The count of one content, large enough to fade by a 256th.
UNIT: Final[i64] = 256
#: Weights of the priors in contents: a class is like its group, and an age like the one before.
CLASS_PRIOR: Final = 2000
AGE_PRIOR: Final = 1000
#: Distinct worths per octave.
STEPS: Final[i64] = 2


class ReturnRates:
    """Counts by class and age: contents that reached the age, and contents that were used again at it.

    Args:
        num_blocks: blocks of the pool, the unit of ages.
        sampled_one_in: one in this many contents is counted.
    """

    def __init__(self, num_blocks: int, sampled_one_in: int) -> None:
        #: The age at which each bucket begins, and the age at which the last one ends.
        unit = max(num_blocks, SMALLEST_POOL)
        self.begins = zeros_i64(int(NUM_AGES) + 1)
        for age in range(1, int(NUM_AGES) + 1):
            self.begins[age] = unit * 4 ** (age // 5) * FIFTHS[age % 5] // (16 * 128)
        self._entered = zeros_i64(int(NUM_CLASSES * NUM_AGES))
        self._returned = zeros_i64(int(NUM_CLASSES * NUM_AGES))
        self._class_prior = max(CLASS_PRIOR // sampled_one_in, 20) * UNIT
        self._age_prior = max(AGE_PRIOR // sampled_one_in, 1) * UNIT
        self._worth = zeros_i64(int(NUM_CLASSES * NUM_AGES))

    def count_entry(self, cell: i64) -> None:
        """Count a content that reached an age. `cell` is class * NUM_AGES + age."""
        self._entered[cell] += UNIT

    def count_return(self, cell: i64) -> None:
        """Count a content that was used again at an age. `cell` is class * NUM_AGES + age."""
        self._returned[cell] += UNIT

    def fade(self) -> None:
        """Reduce all counts by a 256th."""
        for cell in range(NUM_CLASSES * NUM_AGES):
            self._entered[cell] -= self._entered[cell] >> 8
            self._returned[cell] -= self._returned[cell] >> 8

    def worths(self) -> vec[i64]:
        """Return the worth of a block of each cell, in steps of about 40 % or 20 %. O(NUM_CLASSES * NUM_AGES**2).

        The worth is Gittins' index: the block is kept until some age, and the worth is the highest ratio of hits to
        block time over all such ages. A child is never worth more than its parents in the same chain.
        """
        self._group_worths(NEW, END)
        self._group_worths(END, SHARED)
        self._group_worths(SHARED, NUM_CLASSES)
        for age in range(NUM_AGES):
            self._parents_above_children(age)
        for cell in range(NUM_CLASSES * NUM_AGES):
            self._worth[cell] = rounded(self._worth[cell], STEPS)
        return self._worth

    def _group_worths(self, first: i64, end: i64) -> None:
        assumed = zeros_i64(int(NUM_AGES))
        chance: i64 = 0
        for age in range(NUM_AGES):
            chance = self._group_chance(first, end, age, chance)
            assumed[age] = chance
        for kind in range(first, end):
            self._class_worths(kind * NUM_AGES, assumed)

    def _group_chance(self, first: i64, end: i64, age: i64, younger: i64) -> i64:
        """Return the chance that a content of the group is used again at this age.

        The chance at the age before is the prior.
        """
        entered: i64 = 0
        returned: i64 = 0
        for kind in range(first, end):
            entered += self._entered[kind * NUM_AGES + age]
            returned += self._returned[kind * NUM_AGES + age]
        return (returned * ONE + self._age_prior * younger) // (entered + self._age_prior)

    def _class_worths(self, cell: i64, assumed: vec[i64]) -> None:
        prior = self._class_prior
        for age in range(NUM_AGES):
            returned = self._returned[cell + age] * ONE + prior * assumed[age]
            self._worth[cell + age] = min(returned // (self._entered[cell + age] + prior), ONE)
        # A worth needs only the chances of its age and later ones, so it can overwrite the chance of its age.
        for age in range(NUM_AGES):
            self._worth[cell + age] = self._best_ratio(cell, age)

    def _best_ratio(self, cell: i64, first: i64) -> i64:
        """Return the highest ratio of hits to block time that keeping the block until some age gives.

        The block is halfway through its present age.
        """
        there = ONE
        hits: i64 = 0
        time: i64 = 0
        best: i64 = 0
        for age in range(first, NUM_AGES):
            length = self.begins[age + 1] - self.begins[age]
            chance = self._worth[cell + age]
            if age == first:
                length = (length + 1) >> 1
                chance >>= 1
            hit = (there * chance) >> 20
            hits += hit
            time += ((there - (hit >> 1)) * length) >> 6
            there -= hit
            best = max(best, hits * 2**40 // (time + 1))
        return best

    def _parents_above_children(self, age: i64) -> None:
        worth = self._worth
        new_end = END * NUM_AGES + age
        continued_end = new_end + NUM_AGES
        shared = SHARED * NUM_AGES + age
        for kind in range(NEW, END):
            cell = kind * NUM_AGES + age
            end = new_end if kind < CONTINUED else continued_end
            worth[end] = min(worth[end], worth[cell])
            worth[shared] = max(worth[shared], worth[cell])
        for cell in range(shared + NUM_AGES, NUM_CLASSES * NUM_AGES, NUM_AGES):
            worth[cell] = max(worth[cell], worth[cell - NUM_AGES])


def rounded(worth: i64, steps: i64) -> i64:
    """Round to two or four steps per octave.

    Smaller differences are noise, and of equal blocks the older one is evicted.
    """
    octave: i64 = 0
    while worth >= 2 * steps:
        worth >>= 1
        octave += 1
    return steps * octave + worth
