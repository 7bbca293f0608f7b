"""The one-dimensional inputs of a step, written into a caller's arrays."""

from typing import Final

from mypy_extensions import i64

from .caller_arrays import Column, FilledStep

#: The slot of a padded token: kernels write nothing there.
NO_SLOT: Final[i64] = -1


class SlotColumn(Column):
    """The slot of each token."""

    def lay_out(self, step: FilledStep) -> None:
        items = self.room(self.length)
        slots = step.slots
        if step.num_tokens > 0 and len(slots) == 0:
            step.table.map_slots(step.batch.rows, step.batch.starts, step.batch.scheduled, items)
        else:
            for index in range(step.num_tokens):
                items[index] = slots[index]
        if self.is_narrow:
            self.require_narrow(step.num_tokens)

    def write(self, step: FilledStep) -> None:
        self.copy(step.num_tokens, step.padded_tokens, NO_SLOT)

    def is_of_group(self) -> bool:
        return True


class TokenColumn(Column):
    """The id of each token, -1 if it is unknown."""

    def lay_out(self, step: FilledStep) -> None:
        batch = step.batch
        batch.tokens.write(batch.rows, batch.starts, batch.scheduled, step.slots, self.room(self.length))

    def write(self, step: FilledStep) -> None:
        self.copy(step.num_tokens, step.padded_tokens, 0)


class PositionColumn(Column):
    """The position of each token in its sequence."""

    def lay_out(self, step: FilledStep) -> None:
        step.batch.write_positions(self.room(self.length))

    def write(self, step: FilledStep) -> None:
        self.copy(step.num_tokens, step.padded_tokens, 0)


class LengthColumn(Column):
    """The number of tokens of each sequence after the step."""

    def num_needed(self, step: FilledStep) -> i64:
        return step.padded_seqs

    def lay_out(self, step: FilledStep) -> None:
        items = self.room(self.length)
        starts = step.batch.starts
        scheduled = step.batch.scheduled
        for index in range(i64(len(starts))):
            items[index] = starts[index] + scheduled[index]

    def write(self, step: FilledStep) -> None:
        self.copy(i64(len(step.batch.rows)), step.padded_seqs, 0)


class StartColumn(Column):
    """The position of each sequence's first token in the step, and the number of tokens as the last item."""

    def num_needed(self, step: FilledStep) -> i64:
        return step.padded_seqs + 1

    def lay_out(self, step: FilledStep) -> None:
        items = self.room(self.length)
        scheduled = step.batch.scheduled
        total: i64 = 0
        for index in range(i64(len(scheduled))):
            items[index] = total
            total += scheduled[index]
        items[i64(len(scheduled))] = total

    def write(self, step: FilledStep) -> None:
        self.copy(i64(len(step.batch.rows)) + 1, step.padded_seqs + 1, step.num_tokens)
