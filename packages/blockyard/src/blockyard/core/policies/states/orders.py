"""Orders of checkpoints: the one with the lowest score is dropped first."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvalidArgument
from ...arrays import zeros_float
from .ages import NUM_AGES, AgeCounts, age_edges
from .checkpoint import NUM_KINDS, OVER, Checkpoint

#: The assumed length of the last bucket, in requests.
LAST_LENGTH: Final[i64] = 8000
NUM_HITS: Final[i64] = 3
NUM_CHAINS: Final[i64] = 4
NUM_CLASSES: Final[i64] = NUM_KINDS * 12
#: Classes from here on are of ended sessions. Until they have shown hits, these are assumed to be rarer by `DOUBT`.
FIRST_OVER: Final[i64] = OVER * 12
DOUBT: Final[float] = 0.1
#: What is assumed of an age weighs as much as this many checkpoints seen there.
PRIOR: Final[float] = 10.0
#: The hits of an age are assumed to be this share of those one bucket younger.
AGING: Final[float] = 0.9
RELEARNED_EVERY: Final[i64] = 50


class CheckpointOrder:
    """Scores a checkpoint: its gain times the weight of its cell. Weights change with time, gains do not.

    Args:
        state_tokens: bytes of a checkpoint, in bytes of keys and values of a token.
    """

    #: Whether dropped checkpoints are remembered for `learn`, and one that would be dropped at once is refused.
    learns = False

    def __init__(self, state_tokens: i64) -> None:
        self.state_tokens = state_tokens
        #: Cells are numbers below this one.
        self.num_cells: i64 = 1

    def cell(self, checkpoint: Checkpoint, now: i64) -> i64:  # noqa: ARG002
        """Return the cell of a checkpoint. O(1)."""
        return 0

    def weight(self, cell: i64) -> float:  # noqa: ARG002
        """Return the weight of a cell now. O(1)."""
        return 1.0

    def gain(self, checkpoint: Checkpoint, above: i64) -> float:
        """Return the score of a checkpoint in a cell of weight 1. O(1).

        Args:
            checkpoint: the checkpoint.
            above: position of the next cached checkpoint up; only tokens after it are saved.
        """
        raise NotImplementedError("a CheckpointOrder must have gain()")

    def score(self, checkpoint: Checkpoint, above: i64, now: i64) -> float:
        """Return the score of a checkpoint at request `now`. O(1)."""
        return self.weight(self.cell(checkpoint, now)) * self.gain(checkpoint, above)

    def note(self, checkpoint: Checkpoint, is_hit: bool, now: i64) -> None:
        """Note a hit of a checkpoint, or that it had none up to now and is watched no longer."""

    def learn(self, ages: AgeCounts, now: i64) -> None:
        """Update the weights from the notes and from the ages of watched checkpoints."""


class LRUOrder(CheckpointOrder):
    """Drops the checkpoint used longest ago; among those of one request the longest prefix."""

    def gain(self, checkpoint: Checkpoint, above: i64) -> float:  # noqa: ARG002
        return float(checkpoint.use_order)


class LearnedOrder(CheckpointOrder):
    """Drops the checkpoint that saves the fewest tokens for its bytes, by the hits that its class has at its age.

    The weight of a class and age is its Gittins index: expected hits for the time held, the best ratio over all ages to
    hold it to. A class is a kind (one for all whose session is over), hits so far (0, 1, more), and the length of the
    chain of hits that led there (0, 1, 2 and 3, more). Counts are mixed with an assumption that weighs `PRIOR`
    checkpoints.
    """

    learns = True

    def __init__(self, state_tokens: i64) -> None:
        super().__init__(state_tokens)
        self._edge = age_edges()
        self.num_cells = NUM_CLASSES * NUM_AGES
        cells = int(NUM_CLASSES * NUM_AGES)
        #: By cell: checkpoints that were that old, their hits, the share of hits, and the index.
        self._seen = zeros_float(cells)
        self._hit = zeros_float(cells)
        self._chance = zeros_float(cells)
        num_over = int(NUM_CLASSES - FIRST_OVER) * int(NUM_AGES)
        self._index = vec[float]([1.0] * (cells - num_over) + [DOUBT] * num_over)

    def cell(self, checkpoint: Checkpoint, now: i64) -> i64:
        return self._row(checkpoint) + self._bucket(checkpoint.age(now))

    def weight(self, cell: i64) -> float:
        return self._index[cell]

    def gain(self, checkpoint: Checkpoint, above: i64) -> float:
        """Return the tokens that it saves, for the tokens of memory that it takes."""
        return float(checkpoint.position - above) / float(self.state_tokens + checkpoint.own_tokens)

    def _row(self, checkpoint: Checkpoint) -> i64:
        chain = checkpoint.chain
        if chain >= 2:
            chain = 2 if chain <= 3 else 3
        kind = OVER if checkpoint.is_over else checkpoint.kind
        return ((kind * NUM_HITS + min(checkpoint.num_hits, NUM_HITS - 1)) * NUM_CHAINS + chain) * NUM_AGES

    def _bucket(self, age: i64) -> i64:
        bucket: i64 = 0
        while age >= self._edge[bucket + 1]:
            bucket += 1
        return bucket

    def note(self, checkpoint: Checkpoint, is_hit: bool, now: i64) -> None:
        """Count a trial for each age that it passed, and a hit in the last one."""
        row = self._row(checkpoint)
        age = checkpoint.age(now)
        last = self._bucket(age)
        for bucket in range(last):
            self._seen[row + bucket] += 1.0
        if is_hit:
            self._seen[row + last] += 1.0
            self._hit[row + last] += 1.0
        else:
            # The passed part of its bucket.
            first, end = self._edge[last], self._edge[last + 1]
            self._seen[row + last] += float(age - first) / float(end - first)

    def learn(self, ages: AgeCounts, now: i64) -> None:
        """Compute chances from counts, then all indices. O(classes * ages**2)."""
        seen = self._seen[:]
        for number in range(NUM_CLASSES):
            num_older: i64 = 0
            age = NUM_AGES
            while age > 0:
                age -= 1
                cell = number * NUM_AGES + age
                passed = ages.count[cell] * (now + 1 - self._edge[age]) - ages.sum_last_used[cell]
                seen[cell] += float(num_older) + float(passed) / float(self._edge[age + 1] - self._edge[age])
                num_older += ages.count[cell]
        # A class without counts begins with those of all classes.
        all_seen = 2.0
        all_hit = 0.1
        for number in range(NUM_CLASSES):
            all_seen += seen[number * NUM_AGES]
            all_hit += self._hit[number * NUM_AGES]
        # All classes without counts are alike, so one is learned and copied.
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
            assumed = AGING * self._chance[cell]
        for first in range(NUM_AGES):
            self._index[row + first] = self._best_ratio(row, first)

    def _best_ratio(self, row: i64, first: i64) -> float:
        """Return the highest ratio of hits to time, over all ages until which the checkpoint could be kept.

        A hit is counted halfway through its bucket.
        """
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


def make_order(name: str, state_tokens: i64) -> CheckpointOrder:
    """Return the order of a name, "index" or "lru". Raises `InvalidArgument` for another name."""
    if name == "lru":
        return LRUOrder(state_tokens)
    if name == "index":
        return LearnedOrder(state_tokens)
    raise InvalidArgument(f"order is {name!r}; it must be index or lru")
