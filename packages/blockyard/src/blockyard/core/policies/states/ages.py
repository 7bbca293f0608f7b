"""The ages of states: how many there are of each class and age, and which of them reach the next age."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import zeros_i64
from .state import NOT_COUNTED, State
from .tree import NO_STATE

#: Ages in requests at which buckets begin, each 1.5 times the one before; nothing is older than the last.
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
#: Requests that are told apart, more than the last bucket begins after.
NUM_REQUESTS: Final[i64] = 16384


def age_edges() -> vec[i64]:
    """Return the ages at which buckets begin, and where the last one ends."""
    edges = zeros_i64(int(NUM_AGES) + 1)
    for age in range(int(NUM_AGES)):
        edges[age] = EDGES[age]
    edges[NUM_AGES] = LAST_EDGE
    return edges


class StateAges:
    """Counts of states by class and age, and by the request that used them last.

    States of one request reach the next age together, so that a request finds those that do without a look at the
    others. A cell is a class times `NUM_AGES` plus an age. States are linked by their numbers; all operations are O(1).
    """

    def __init__(self, states: list[State], num_cells: int) -> None:
        self.states = states
        self._edge = age_edges()
        #: By cell: how many states there are, and the sum of the requests that used them last.
        self.count = zeros_i64(num_cells)
        self.since = zeros_i64(num_cells)
        #: The first state by last request, of those that can reach another age.
        self._first = zeros_i64(int(NUM_REQUESTS))

    def put(self, state: State, cell: i64) -> None:
        """Count a state in `cell`, and no longer where it was counted."""
        self.take(state)
        state.cell = cell
        state.counted_since = state.since
        self.count[cell] += 1
        self.since[cell] += state.since
        if cell % NUM_AGES < NUM_AGES - 1:
            slot = state.since % NUM_REQUESTS
            after = self._first[slot]
            state.age_before, state.age_after = NO_STATE, after
            self._first[slot] = state.number
            if after != NO_STATE:
                self.states[after].age_before = state.number

    def take(self, state: State) -> None:
        """Stop counting a state."""
        cell = state.cell
        if cell == NOT_COUNTED:
            return
        state.cell = NOT_COUNTED
        self.count[cell] -= 1
        self.since[cell] -= state.counted_since
        if cell % NUM_AGES < NUM_AGES - 1:
            before, after = state.age_before, state.age_after
            if before == NO_STATE:
                self._first[state.counted_since % NUM_REQUESTS] = after
            else:
                self.states[before].age_after = after
            if after != NO_STATE:
                self.states[after].age_before = before

    def first_of(self, age: i64, now: i64) -> i64:
        """Return the first state that reaches `age` with request `now`; the others are behind its `age_after`."""
        since = now + 1 - self._edge[age]
        return self._first[since % NUM_REQUESTS] if since > 0 else NO_STATE

    def check(self, states: list[State]) -> None:
        """Count `states` from scratch. Raises `InvariantError`."""
        counts: dict[int, int] = {}
        sums: dict[int, int] = {}
        num_linked = 0
        for state in states:
            counts[int(state.cell)] = counts.get(int(state.cell), 0) + 1
            sums[int(state.cell)] = sums.get(int(state.cell), 0) + int(state.since)
            num_linked += 1 if state.cell % NUM_AGES < NUM_AGES - 1 else 0
        for cell in range(i64(len(self.count))):
            if self.count[cell] != counts.get(int(cell), 0) or self.since[cell] != sums.get(int(cell), 0):
                raise InvariantError(f"states: {counts.get(int(cell), 0)} are in cell {cell}, not {self.count[cell]}")
        for slot in range(NUM_REQUESTS):
            number = self._first[slot]
            while number != NO_STATE:
                num_linked -= 1
                if self.states[number].since % NUM_REQUESTS != slot or num_linked < 0:
                    raise InvariantError(f"states: state {number} is linked to requests like {slot}")
                number = self.states[number].age_after
        if num_linked != 0:
            raise InvariantError(f"states: {num_linked} are linked to no request")
