"""Cached checkpoints in eviction order."""

from typing import Final

from mypy_extensions import i64

from ....errors import InvariantError
from ...arrays import zeros_i64
from .checkpoint import Checkpoint
from .orders import CheckpointOrder
from .prefix_tree import NO_CHECKPOINT

#: Groups, in the order in which they are dropped: idle and its session over, idle, held and its session over, held.
NUM_GROUPS: Final[i64] = 4
HELD: Final[i64] = 2
NOT_OVER: Final[i64] = 1


class CheckpointHeaps:
    """One leftist heap for each group and cell, linked by the checkpoints' numbers.

    All checkpoints of a cell have the same weight, so the order within a heap does not change with time: the lowest
    gain is first, of equal ones the longest prefix, of equal ones of these the one used longest ago.
    """

    def __init__(self, checkpoints: list[Checkpoint], order: CheckpointOrder) -> None:
        self.checkpoints = checkpoints
        self.order = order
        self.num_cells: i64 = order.num_cells
        size = int(NUM_GROUPS * self.num_cells)
        #: By group and cell, the checkpoint to drop first.
        self._first = zeros_i64(size)
        #: Heaps that have checkpoints, in no order, and the index of each heap here.
        self._used = zeros_i64(size)
        self._place = zeros_i64(size)
        self._num_used: i64 = 0

    def put(self, checkpoint: Checkpoint, group: i64, cell: i64, gain: float) -> None:
        """Add a checkpoint, or move it. O(log checkpoints)."""
        self.take(checkpoint)
        heap = group * self.num_cells + cell
        checkpoint.heap = heap + 1
        checkpoint.gain = gain
        checkpoint.rank = 1
        first = self._first[heap]
        if first == NO_CHECKPOINT:
            self._place[heap] = self._num_used
            self._used[self._num_used] = heap
            self._num_used += 1
        first = self._merged(first, checkpoint.number)
        self.checkpoints[first].up = NO_CHECKPOINT
        self._first[heap] = first

    def take(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint, if it is here; its gain may have changed already. O(log checkpoints)."""
        if checkpoint.heap == 0:
            return
        heap = checkpoint.heap - 1
        up = checkpoint.up
        rest = self._merged(checkpoint.left, checkpoint.right)
        checkpoint.heap = 0
        checkpoint.left = checkpoint.right = checkpoint.up = NO_CHECKPOINT
        if rest != NO_CHECKPOINT:
            self.checkpoints[rest].up = up
        if up == NO_CHECKPOINT:
            self._first[heap] = rest
            if rest == NO_CHECKPOINT:
                self._num_used -= 1
                last = self._used[self._num_used]
                self._used[self._place[heap]] = last
                self._place[last] = self._place[heap]
            return
        above = self.checkpoints[up]
        if above.left == checkpoint.number:
            above.left = rest
        else:
            above.right = rest
        while up != NO_CHECKPOINT and self._mend(self.checkpoints[up]):
            up = self.checkpoints[up].up

    def _merged(self, one: i64, other: i64) -> i64:
        """Merge two heaps and return the top one; the caller sets its `up`."""
        top = NO_CHECKPOINT
        last = NO_CHECKPOINT
        while one != NO_CHECKPOINT and other != NO_CHECKPOINT:
            if self._is_before(self.checkpoints[other], self.checkpoints[one]):
                one, other = other, one
            if last == NO_CHECKPOINT:
                top = one
            else:
                self.checkpoints[last].right = one
                self.checkpoints[one].up = last
            last = one
            one = self.checkpoints[one].right
        rest = one if one != NO_CHECKPOINT else other
        if last == NO_CHECKPOINT:
            return rest
        self.checkpoints[last].right = rest
        if rest != NO_CHECKPOINT:
            self.checkpoints[rest].up = last
        while last != top:
            self._mend(self.checkpoints[last])
            last = self.checkpoints[last].up
        self._mend(self.checkpoints[top])
        return top

    def _mend(self, checkpoint: Checkpoint) -> bool:
        """Put the child of the higher rank to the left. Returns whether the rank of `checkpoint` changed."""
        left = self.checkpoints[checkpoint.left].rank
        right = self.checkpoints[checkpoint.right].rank
        if left < right:
            checkpoint.left, checkpoint.right = checkpoint.right, checkpoint.left
            right = left
        if checkpoint.rank == right + 1:
            return False
        checkpoint.rank = right + 1
        return True

    def _is_before(self, checkpoint: Checkpoint, other: Checkpoint) -> bool:
        if checkpoint.gain != other.gain:
            return checkpoint.gain < other.gain
        return self._breaks_tie(checkpoint, other)

    def _breaks_tie(self, checkpoint: Checkpoint, other: Checkpoint) -> bool:
        if checkpoint.position != other.position:
            return checkpoint.position > other.position
        return checkpoint.use_order < other.use_order

    def lowest(self) -> i64:
        """Return the checkpoint to drop first; 0 if there is none. O(cells that have checkpoints)."""
        lowest = NO_CHECKPOINT
        lowest_group = NUM_GROUPS
        lowest_score = 0.0
        for place in range(self._num_used):
            heap = self._used[place]
            group = heap // self.num_cells
            if group > lowest_group:
                continue
            number = self._first[heap]
            score = self.order.weight(heap % self.num_cells) * self.checkpoints[number].gain
            is_first = group < lowest_group or score < lowest_score
            if is_first or (
                score == lowest_score and self._breaks_tie(self.checkpoints[number], self.checkpoints[lowest])
            ):
                lowest, lowest_group, lowest_score = number, group, score
        return lowest

    def score(self, checkpoint: Checkpoint) -> float:
        """Return the score of a checkpoint in a heap."""
        return self.order.weight((checkpoint.heap - 1) % self.num_cells) * checkpoint.gain

    def check(self, checkpoints: list[Checkpoint]) -> None:
        """Check that exactly `checkpoints` are in the heaps, each in order. O(checkpoints). Raises `InvariantError`."""
        for checkpoint in checkpoints:
            up = self.checkpoints[checkpoint.up]
            if checkpoint.up == NO_CHECKPOINT:
                is_linked = checkpoint.heap > 0 and self._first[checkpoint.heap - 1] == checkpoint.number
            else:
                is_linked = up.heap == checkpoint.heap and checkpoint.number in (up.left, up.right)
                is_linked = is_linked and not self._is_before(checkpoint, up)
            left, right = self.checkpoints[checkpoint.left].rank, self.checkpoints[checkpoint.right].rank
            if not is_linked or left < right or checkpoint.rank != right + 1:
                raise InvariantError(f"states: checkpoint {checkpoint.number} is out of order")
        heaps = {int(checkpoint.heap) - 1 for checkpoint in checkpoints}
        if heaps != {int(self._used[place]) for place in range(self._num_used)}:
            raise InvariantError(f"states: {self._num_used} cells are said to have checkpoints, {len(heaps)} have")
