"""Which checkpoint positions the step that is being planned saves or refuses."""

from mypy_extensions import i64

from ..arrays import zeros_i64
from ..policies.states.checkpoint import OUTPUT_END
from .checkpoint_positions import CheckpointPositions
from .group_table import NEVER
from .refused_checkpoints import RefusedCheckpoints
from .transfers import Numbers


class StepDecisions:
    """The decisions of one step: which wanted positions of each row it saves, and which it refuses.

    The next step overwrites them, so a step that fails leaves nothing to undo. `record` keeps the decisions about a
    row that is served.
    """

    def __init__(self, positions: CheckpointPositions, refused: RefusedCheckpoints, num_rows: int) -> None:
        self.positions = positions
        self.refused = refused
        #: The step, and by row the one in which `plan` was called last.
        self._step: i64 = 0
        self._planned_in = zeros_i64(num_rows)
        #: Accepted positions of the step. Those of a row begin at `_first`, and there are `_count`.
        self._accepted = Numbers()
        self._first = zeros_i64(num_rows)
        self._count = zeros_i64(num_rows)
        #: By planned row, its next accepted position, and the tokens from which it is known.
        self._next = zeros_i64(num_rows)
        self._since = zeros_i64(num_rows)
        #: (row, position, kind) of each position that the step refuses.
        self._refusals = Numbers()
        #: Planned rows that stay `ready`.
        self._rest = Numbers()

    def begin(self) -> None:
        """Begin to plan a step."""
        self._step += 1
        self._accepted.clear()
        self._refusals.clear()
        self._rest.clear()

    def plan(self, row: i64, start: i64, end: i64, is_cut: bool) -> None:
        """Decide about the positions of a row from `start` to `end` tokens.

        A position before `start` counts if its state is supplied from outside. If `is_cut`, the step ends at the first
        accepted position.
        """
        missing_until = self.positions.missing_until[row]
        since = start if start >= missing_until else 0
        first = self._accepted.count
        position = self._next_accepted(row, since)
        while position <= end:
            self._accepted.add(position)
            if is_cut:
                break
            since = position
            position = self._next_accepted(row, since)
        self._first[row] = first
        self._count[row] = self._accepted.count - first
        self._next[row] = position
        self._since[row] = since if since >= missing_until else NEVER
        self._planned_in[row] = self._step

    def _next_accepted(self, row: i64, start: i64) -> i64:
        """Return the next position after `start` tokens that is accepted; `NEVER` for none. Collects refusals.

        An output has no checkpoints after a refused one.
        """
        if self.positions.seen_from[row] <= start < self.positions.next_position[row]:
            return self.positions.next_position[row]
        position = self.positions.next_after(row, start)
        while position != NEVER:
            kind = self.positions.kind_at(row, position)
            if not self.refused.is_pending(row, position):
                if not self.refused.is_worthless(row, position, kind):
                    return position
                self._refusals.add(row)
                self._refusals.add(position)
                self._refusals.add(kind)
            position = NEVER if kind == OUTPUT_END else self.positions.next_after(row, position)
        return NEVER

    def num_accepted(self, row: i64) -> i64:
        """Return how many positions of a row the step checkpoints."""
        return self._count[row] if self._planned_in[row] == self._step else 0

    def accepted(self, row: i64, number: i64) -> i64:
        """Return one of these positions. number: 0 for the first."""
        return i64(self._accepted.items[self._first[row] + number])

    def has_refusals(self, row: i64) -> bool:
        """Return whether the step refuses positions of the row that `plan` was called for last."""
        count = self._refusals.count
        return count > 0 and i64(self._refusals.items[count - 3]) == row

    def record(self, row: i64) -> None:
        """Keep the decisions about a row, if `plan` made any in this step. O(refusals of the step)."""
        if self._planned_in[row] != self._step:
            return
        self.positions.next_position[row] = self._next[row]
        self.positions.seen_from[row] = self._since[row]
        items = self._refusals.items
        for place in range(0, self._refusals.count, 3):
            if i64(items[place]) == row:
                self.refused.add(row, i64(items[place + 1]), i64(items[place + 2]))

    def record_later(self, row: i64) -> None:
        """Let `record_rest` keep the decisions about a row."""
        self._rest.add(row)

    def record_rest(self) -> None:
        """Keep the decisions about the rows of `record_later`, once the step can no longer fail. O(these rows)."""
        for place in range(self._rest.count):
            self.record(i64(self._rest.items[place]))
