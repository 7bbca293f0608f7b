"""Counts of checkpoints by class and age, and which of them reach the next age."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import zeros_i64
from .checkpoint import NOT_COUNTED, Checkpoint
from .prefix_tree import NO_CHECKPOINT

#: Ages in requests at which buckets begin, each 1.5 times the one before.
EDGES: Final = (
    1,
    2,
    3,
    5,
    7,
    11,
    17,
    25,
    38,
    57,
    86,
    129,
    194,
    291,
    437,
    656,
    985,
    1477,
    2216,
    3325,
    4987,
    7481,
    11222,
)
NUM_AGES: Final[i64] = 23
#: Where the last bucket ends.
LAST_EDGE: Final = 2**40
#: Requests are told apart modulo this number, which is more than the last bucket begins at.
NUM_REQUESTS: Final[i64] = 16384


def age_edges() -> vec[i64]:
    """Return the ages at which buckets begin, and the end of the last one."""
    edges = zeros_i64(int(NUM_AGES) + 1)
    for age in range(int(NUM_AGES)):
        edges[age] = EDGES[age]
    edges[NUM_AGES] = LAST_EDGE
    return edges


class AgeCounts:
    """Counts checkpoints by cell: class times `NUM_AGES` plus age. All operations are O(1).

    Checkpoints that one request used last reach the next age together, so they are linked in one list.
    """

    def __init__(self, checkpoints: list[Checkpoint], num_cells: int) -> None:
        self.checkpoints = checkpoints
        self._edge = age_edges()
        #: By cell, how many checkpoints it has, and the sum of the numbers of their last requests.
        self.count = zeros_i64(num_cells)
        self.sum_last_used = zeros_i64(num_cells)
        #: By last request, modulo `NUM_REQUESTS`, the first of the checkpoints that can reach another age.
        self._first = zeros_i64(int(NUM_REQUESTS))

    def put(self, checkpoint: Checkpoint, cell: i64) -> None:
        """Count a checkpoint in `cell`, and no longer in its last cell."""
        self.take(checkpoint)
        checkpoint.cell = cell
        checkpoint.counted_last_used = checkpoint.last_used
        self.count[cell] += 1
        self.sum_last_used[cell] += checkpoint.last_used
        if cell % NUM_AGES < NUM_AGES - 1:
            slot = checkpoint.last_used % NUM_REQUESTS
            after = self._first[slot]
            checkpoint.age_before, checkpoint.age_after = NO_CHECKPOINT, after
            self._first[slot] = checkpoint.number
            if after != NO_CHECKPOINT:
                self.checkpoints[after].age_before = checkpoint.number

    def take(self, checkpoint: Checkpoint) -> None:
        """Stop counting a checkpoint."""
        cell = checkpoint.cell
        if cell == NOT_COUNTED:
            return
        checkpoint.cell = NOT_COUNTED
        self.count[cell] -= 1
        self.sum_last_used[cell] -= checkpoint.counted_last_used
        if cell % NUM_AGES < NUM_AGES - 1:
            before, after = checkpoint.age_before, checkpoint.age_after
            if before == NO_CHECKPOINT:
                self._first[checkpoint.counted_last_used % NUM_REQUESTS] = after
            else:
                self.checkpoints[before].age_after = after
            if after != NO_CHECKPOINT:
                self.checkpoints[after].age_before = before

    def first_of(self, age: i64, now: i64) -> i64:
        """Return the first checkpoint that reaches `age` with request `now`; `age_after` links the others."""
        since = now + 1 - self._edge[age]
        return self._first[since % NUM_REQUESTS] if since > 0 else NO_CHECKPOINT

    def check(self, checkpoints: list[Checkpoint]) -> None:
        """Count `checkpoints` from scratch. Raises `InvariantError`."""
        counts: dict[int, int] = {}
        sums: dict[int, int] = {}
        num_linked = 0
        for checkpoint in checkpoints:
            counts[int(checkpoint.cell)] = counts.get(int(checkpoint.cell), 0) + 1
            sums[int(checkpoint.cell)] = sums.get(int(checkpoint.cell), 0) + int(checkpoint.last_used)
            num_linked += 1 if checkpoint.cell % NUM_AGES < NUM_AGES - 1 else 0
        for cell in range(i64(len(self.count))):
            if self.count[cell] != counts.get(int(cell), 0) or self.sum_last_used[cell] != sums.get(int(cell), 0):
                raise InvariantError(f"states: {counts.get(int(cell), 0)} are in cell {cell}, not {self.count[cell]}")
        for slot in range(NUM_REQUESTS):
            number = self._first[slot]
            while number != NO_CHECKPOINT:
                num_linked -= 1
                if self.checkpoints[number].last_used % NUM_REQUESTS != slot or num_linked < 0:
                    raise InvariantError(f"states: checkpoint {number} is linked to requests like {slot}")
                number = self.checkpoints[number].age_after
        if num_linked != 0:
            raise InvariantError(f"states: {num_linked} are linked to no request")
