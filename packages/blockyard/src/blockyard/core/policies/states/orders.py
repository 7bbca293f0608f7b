"""The state with the lowest score goes first."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvalidArgument
from ...arrays import zeros_float
from .ages import NUM_AGES, StateAges, age_edges
from .state import KINDS, OVER, State

#: How long the last bucket is taken to be.
LAST_LENGTH: Final[i64] = 8000
NUM_HITS: Final[i64] = 3
NUM_CHAINS: Final[i64] = 4
NUM_CLASSES: Final[i64] = len(KINDS) * 12
#: Classes from here on are of states whose session is over: hits are taken to be this much rarer until they are seen.
FIRST_OVER: Final[i64] = OVER * 12
DOUBT: Final[float] = 0.1
#: What is assumed of an age weighs as much as this many states that were seen there.
PRIOR: Final[float] = 10.0
#: It is assumed to be this share of what was seen one bucket younger.
KEPT_ON: Final[float] = 0.9
RELEARNED_EVERY: Final[i64] = 50


class StateOrder:
    """Says what keeping a state is worth, and learns what became of those that were kept.

    The score of a state is its gain times the weight of its cell. Weights change with time, gains do not.

    state_tokens: bytes of a state, in bytes of keys and values of a token.
    """

    #: Whether states that went are remembered for `learn`, and one that would go at once is not written.
    learns = False

    def __init__(self, state_tokens: i64) -> None:
        self.state_tokens = state_tokens
        #: Cells are numbers below this one.
        self.num_cells: i64 = 1

    def cell(self, state: State, now: i64) -> i64:  # noqa: ARG002
        """Return the cell of a state. O(1)."""
        return 0

    def weight(self, cell: i64) -> float:  # noqa: ARG002
        """Return what a gain of 1 is worth in a cell now. O(1)."""
        return 1.0

    def gain(self, state: State, above: i64) -> float:
        """Return what `state` is worth in a cell of weight 1. O(1).

        above: tokens before the next state up, which it saves nothing of.
        """
        raise NotImplementedError("a StateOrder must have gain()")

    def score(self, state: State, above: i64, now: i64) -> float:
        """Return what `state` is worth. above: as of `gain`. O(1)."""
        return self.weight(self.cell(state, now)) * self.gain(state, above)

    def note(self, state: State, is_hit: bool, now: i64) -> None:
        """A state was hit, or was not up to now and will not be looked at any more."""

    def learn(self, ages: StateAges, now: i64) -> None:
        """Draw the sum of what was noted, every `RELEARNED_EVERY` requests. ages: of all that are looked at."""


class LRUStates(StateOrder):
    """The state used longest ago goes first; of one request the longest prefix."""

    def gain(self, state: State, above: i64) -> float:  # noqa: ARG002
        """Return when it was used."""
        return float(state.stamp)


class LearnedStates(StateOrder):
    """The score is tokens saved a byte, by what is learned of the class of a state at its age: hits by time held, the
    best ratio over all ages to keep it to (Gittins' index).

    A class is a kind (one for all whose session is over), hits so far (0, 1, more), and the length of the chain of hits
    that led there (0, 1, 2 and 3, more). What an age of a class has shown is trusted beside an assumption that weighs
    `PRIOR` states.
    """

    learns = True

    def __init__(self, state_tokens: i64) -> None:
        super().__init__(state_tokens)
        self._edge = age_edges()
        self.num_cells = NUM_CLASSES * NUM_AGES
        cells = int(NUM_CLASSES * NUM_AGES)
        #: By class and age: states that were that old, hits of them, the share of hits, and the index.
        self._seen = zeros_float(cells)
        self._hit = zeros_float(cells)
        self._chance = zeros_float(cells)
        num_over = int(NUM_CLASSES - FIRST_OVER) * int(NUM_AGES)
        self._index = vec[float]([1.0] * (cells - num_over) + [DOUBT] * num_over)

    def cell(self, state: State, now: i64) -> i64:
        """Return the cell of its class at its age."""
        return self._row(state) + self._bucket(state.age(now))

    def weight(self, cell: i64) -> float:
        """Return the index of a class at an age: how soon a hit is expected."""
        return self._index[cell]

    def gain(self, state: State, above: i64) -> float:
        """Return what it saves against the next state up, over what it frees."""
        return float(state.position - above) / float(self.state_tokens + state.alone)

    def _row(self, state: State) -> i64:
        chain = state.chain
        if chain >= 2:
            chain = 2 if chain <= 3 else 3
        kind = OVER if state.is_over else state.kind
        return ((kind * NUM_HITS + min(state.num_hits, NUM_HITS - 1)) * NUM_CHAINS + chain) * NUM_AGES

    def _bucket(self, age: i64) -> i64:
        bucket: i64 = 0
        while age >= self._edge[bucket + 1]:
            bucket += 1
        return bucket

    def _part(self, age: i64, bucket: i64) -> float:
        """Return the part of a bucket that has passed."""
        return float(age - self._edge[bucket]) / float(self._edge[bucket + 1] - self._edge[bucket])

    def note(self, state: State, is_hit: bool, now: i64) -> None:
        """Count one trial for each age that it passed, and in the last a success if it was hit."""
        row = self._row(state)
        age = state.age(now)
        last = self._bucket(age)
        for bucket in range(last):
            self._seen[row + bucket] += 1.0
        if is_hit:
            self._seen[row + last] += 1.0
            self._hit[row + last] += 1.0
        else:
            self._seen[row + last] += self._part(age, last)

    def learn(self, ages: StateAges, now: i64) -> None:
        """Chances from counts, then the index of each class and age. O(classes * ages**2)."""
        seen = self._seen[:]
        for number in range(NUM_CLASSES):
            num_older: i64 = 0
            age = NUM_AGES
            while age > 0:
                age -= 1
                cell = number * NUM_AGES + age
                passed = ages.count[cell] * (now + 1 - self._edge[age]) - ages.since[cell]
                seen[cell] += float(num_older) + float(passed) / float(self._edge[age + 1] - self._edge[age])
                num_older += ages.count[cell]
        # What is not known of any age of a class begins with what is seen of all classes.
        all_seen = 2.0
        all_hit = 0.1
        for number in range(NUM_CLASSES):
            all_seen += seen[number * NUM_AGES]
            all_hit += self._hit[number * NUM_AGES]
        # Of classes that nothing was seen of, one is learned and the others are like it.
        assumed = all_hit / all_seen
        like: i64 = -1
        for number in range(NUM_CLASSES):
            if number == FIRST_OVER:
                assumed *= DOUBT
                like = -1
            row = number * NUM_AGES
            if not self._was_seen(row, seen):
                if like >= 0:
                    for age in range(NUM_AGES):
                        self._chance[row + age] = self._chance[like + age]
                        self._index[row + age] = self._index[like + age]
                    continue
                like = row
            self._learn_class(row, seen, assumed)

    def _was_seen(self, row: i64, seen: vec[float]) -> bool:
        for cell in range(row, row + NUM_AGES):
            if seen[cell] != 0.0 or self._hit[cell] != 0.0:
                return True
        return False

    def _learn_class(self, row: i64, seen: vec[float], assumed: float) -> None:
        for cell in range(row, row + NUM_AGES):
            chance = (self._hit[cell] + PRIOR * assumed) / (seen[cell] + PRIOR)
            self._chance[cell] = min(1.0, chance)
            assumed = KEPT_ON * self._chance[cell]
        for first in range(NUM_AGES):
            self._index[row + first] = self._best_ratio(row, first)

    def _best_ratio(self, row: i64, first: i64) -> float:
        """Return hits by time, the best over all ages to stop at; one that is hit is so halfway through its bucket."""
        there = 1.0
        hits = 0.0
        time = 0.0
        best = 0.0
        for age in range(first, NUM_AGES):
            chance = self._chance[row + age]
            length = self._edge[age + 1] - self._edge[age] if age < NUM_AGES - 1 else LAST_LENGTH
            hits += there * chance
            time += there * float(length) * (1.0 - 0.5 * chance)
            there *= 1.0 - chance
            best = max(best, hits / time)
        return best


def make_order(name: str, state_tokens: i64) -> StateOrder:
    """Return the order of this name: "index" (learned) or "lru". Raise `InvalidArgument` for another."""
    if name == "lru":
        return LRUStates(state_tokens)
    if name == "index":
        return LearnedStates(state_tokens)
    raise InvalidArgument(f"order is {name!r}; it must be index or lru")
