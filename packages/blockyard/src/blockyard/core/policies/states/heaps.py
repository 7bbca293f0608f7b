"""The cached states in eviction order."""

from typing import Final

from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import zeros_i64
from .orders import StateOrder
from .state import State
from .tree import NO_STATE

#: Idle states whose session is over, other idle ones, and the same of busy ones; each group goes before the next.
NUM_GROUPS: Final[i64] = 4
BUSY: Final[i64] = 2
NOT_OVER: Final[i64] = 1


class StateHeaps:
    """Cached states by group and cell, in leftist heaps that are linked by the states' numbers.

    Within a cell the order weighs all states alike, so time changes nothing there: the state of the lowest gain is
    first, of equal ones the longest prefix, and of equal ones of these the one used longest ago.
    """

    def __init__(self, states: list[State], order: StateOrder) -> None:
        self.states = states
        self.order = order
        self.num_cells: i64 = order.num_cells
        size = int(NUM_GROUPS * self.num_cells)
        #: The first state by group and cell.
        self._first = zeros_i64(size)
        #: Cells that have states, in no order, and where each of them stands here.
        self._used = zeros_i64(size)
        self._place = zeros_i64(size)
        self._num_used: i64 = 0

    def put(self, state: State, group: i64, cell: i64, gain: float) -> None:
        """Add a state, or move it. O(log states)."""
        self.take(state)
        heap = group * self.num_cells + cell
        state.heap = heap + 1
        state.gain = gain
        state.rank = 1
        first = self._first[heap]
        if first == NO_STATE:
            self._place[heap] = self._num_used
            self._used[self._num_used] = heap
            self._num_used += 1
        first = self._merged(first, state.number)
        self.states[first].up = NO_STATE
        self._first[heap] = first

    def take(self, state: State) -> None:
        """Remove a state, if it is here; its gain and stamp may have changed. O(log states)."""
        if state.heap == 0:
            return
        heap = state.heap - 1
        up = state.up
        rest = self._merged(state.left, state.right)
        state.heap = 0
        state.left = state.right = state.up = NO_STATE
        if rest != NO_STATE:
            self.states[rest].up = up
        if up == NO_STATE:
            self._first[heap] = rest
            if rest == NO_STATE:
                self._num_used -= 1
                last = self._used[self._num_used]
                self._used[self._place[heap]] = last
                self._place[last] = self._place[heap]
            return
        above = self.states[up]
        if above.left == state.number:
            above.left = rest
        else:
            above.right = rest
        while up != NO_STATE and self._mend(self.states[up]):
            up = self.states[up].up

    def _merged(self, one: i64, other: i64) -> i64:
        """Return the first state of two heaps, made one; `up` of it is for the caller to set."""
        top = NO_STATE
        last = NO_STATE
        while one != NO_STATE and other != NO_STATE:
            if self._is_before(self.states[other], self.states[one]):
                one, other = other, one
            if last == NO_STATE:
                top = one
            else:
                self.states[last].right = one
                self.states[one].up = last
            last = one
            one = self.states[one].right
        rest = one if one != NO_STATE else other
        if last == NO_STATE:
            return rest
        self.states[last].right = rest
        if rest != NO_STATE:
            self.states[rest].up = last
        while last != top:
            self._mend(self.states[last])
            last = self.states[last].up
        self._mend(self.states[top])
        return top

    def _mend(self, state: State) -> bool:
        """Put the heap of the higher rank to the left; return whether the rank of `state` changed."""
        left = self.states[state.left].rank
        right = self.states[state.right].rank
        if left < right:
            state.left, state.right = state.right, state.left
            right = left
        if state.rank == right + 1:
            return False
        state.rank = right + 1
        return True

    def _is_before(self, state: State, other: State) -> bool:
        if state.gain != other.gain:
            return state.gain < other.gain
        return self._breaks_tie(state, other)

    def _breaks_tie(self, state: State, other: State) -> bool:
        if state.position != other.position:
            return state.position > other.position
        return state.stamp < other.stamp

    def lowest(self) -> i64:
        """Return the first state of all; 0 if there is none. O(cells that have states)."""
        lowest = NO_STATE
        lowest_group = NUM_GROUPS
        lowest_score = 0.0
        for place in range(self._num_used):
            heap = self._used[place]
            group = heap // self.num_cells
            if group > lowest_group:
                continue
            number = self._first[heap]
            score = self.order.weight(heap % self.num_cells) * self.states[number].gain
            is_first = group < lowest_group or score < lowest_score
            if is_first or (score == lowest_score and self._breaks_tie(self.states[number], self.states[lowest])):
                lowest, lowest_group, lowest_score = number, group, score
        return lowest

    def score(self, state: State) -> float:
        """Return what a state that is here is worth."""
        return self.order.weight((state.heap - 1) % self.num_cells) * state.gain

    def check(self, states: list[State]) -> None:
        """Each of `states`, and no other, is linked in its heap, behind none that it goes before. O(states)."""
        for state in states:
            up = self.states[state.up]
            if state.up == NO_STATE:
                is_linked = state.heap > 0 and self._first[state.heap - 1] == state.number
            else:
                is_linked = up.heap == state.heap and state.number in (up.left, up.right)
                is_linked = is_linked and not self._is_before(state, up)
            left, right = self.states[state.left].rank, self.states[state.right].rank
            if not is_linked or left < right or state.rank != right + 1:
                raise InvariantError(f"states: state {state.number} is out of order")
        heaps = {int(state.heap) - 1 for state in states}
        if heaps != {int(self._used[place]) for place in range(self._num_used)}:
            raise InvariantError(f"states: {self._num_used} cells are said to have states, {len(heaps)} have")
