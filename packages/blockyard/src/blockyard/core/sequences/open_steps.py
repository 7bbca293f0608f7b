"""The open reservations of each sequence, if several steps may be in flight."""

from mypy_extensions import i64

from ..arrays import power_of_two, zeros_i64


class OpenSteps:
    """A ring per row with the step and the number of tokens of each open reservation, oldest first.

    A row has at most one reservation per step, and all are of the `max_steps` latest steps, so no ring overflows.
    `num_open` has the number of reservations of each row, `oldest` the step of the oldest one, 0 for none.
    """

    def __init__(self, max_num_seqs: int, max_steps: int) -> None:
        size = power_of_two(max_steps)
        self._size: i64 = size
        self._mask: i64 = size - 1
        self.num_open = zeros_i64(max_num_seqs)
        self.oldest = zeros_i64(max_num_seqs)
        self._first = zeros_i64(max_num_seqs)
        self._steps = zeros_i64(max_num_seqs * size)
        self._counts = zeros_i64(max_num_seqs * size)
        #: Number of open reservations by step, modulo the size.
        self._num_of_step = zeros_i64(size)

    def _place(self, row: i64, number: i64) -> i64:
        return row * self._size + (self._first[row] + number & self._mask)

    def push(self, row: i64, step: i64, count: i64) -> None:
        """Add a reservation of `count` tokens in `step`."""
        number = self.num_open[row]
        place = self._place(row, number)
        self._steps[place] = step
        self._counts[place] = count
        self.num_open[row] = number + 1
        if number == 0:
            self.oldest[row] = step
        self._num_of_step[step & self._mask] += 1

    def step_at(self, row: i64, number: i64) -> i64:
        """Return the step of a row's reservation. Number 0 is the oldest."""
        return self._steps[self._place(row, number)]

    def count_at(self, row: i64, number: i64) -> i64:
        """Return the tokens of a row's reservation."""
        return self._counts[self._place(row, number)]

    def oldest_count(self, row: i64) -> i64:
        """Return the tokens of the oldest reservation, 0 for none."""
        return self.count_at(row, 0) if self.num_open[row] > 0 else i64(0)

    def has(self, row: i64, step: i64) -> bool:
        """Return whether a row has a reservation of `step`. O(max_steps)."""
        for number in range(self.num_open[row]):
            if self.step_at(row, number) == step:
                return True
        return False

    def pop(self, row: i64) -> None:
        """End the oldest reservation."""
        self._num_of_step[self.oldest[row] & self._mask] -= 1
        self._first[row] = self._first[row] + 1 & self._mask
        left = self.num_open[row] - 1
        self.num_open[row] = left
        self.oldest[row] = self.step_at(row, 0) if left > 0 else i64(0)

    def clear(self, row: i64) -> None:
        """End all reservations of a row."""
        while self.num_open[row] > 0:
            self.pop(row)

    def num_of_step(self, step: i64) -> i64:
        """Return the number of open reservations of one of the latest steps."""
        return self._num_of_step[step & self._mask]
