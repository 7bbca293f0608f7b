"""The working states of running sequences: one slot a row, outside of the pool."""

from mypy_extensions import i64

from ..arrays import zeros_i64
from ..sequences.table import SequenceTable
from .slot_copies import SlotCopies
from .transfers import Numbers, Transfers


class WorkingStates:
    """Lets the first step of a row clear its slot, or restore the checkpoint of its hit to it.

    Only row n writes slot n. `SequenceTable.copy_from` has the blocks to restore from.

    Attributes:
        is_filled: by row, 1 once a plan has filled its slot.
        opening: rows whose slots the next plan fills.
        copies: slots that the next plan copies to others, for forks.
    """

    def __init__(self, sequences: SequenceTable) -> None:
        self.sequences = sequences
        rows = int(sequences.max_num_seqs)
        self.is_filled = zeros_i64(rows)
        self.opening = Numbers()
        self.copies = SlotCopies(rows)
        self._nothing: list[int] = []

    def slot_of(self, row: i64) -> i64:
        """Return the slot that has the state of `row` now. O(1)."""
        return self.copies.source(row)

    def fork(self, row: i64, child: i64) -> None:
        """Let the next plan copy the slot of `row`, if it is filled."""
        self.is_filled[child] = self.is_filled[row]
        if self.is_filled[row] != 0:
            self.copies.add(row, child)

    def fill(self, row: i64, transfers: Transfers) -> None:
        """Let the plan restore or clear the slot of a row, unless it is filled."""
        if self.is_filled[row] == 0:
            source = self.sequences.copy_from[row]
            if source:
                transfers.load_state(row, source)
            else:
                transfers.clear_state(row)
            self.opening.add(row)

    def copy_slots(self, transfers: Transfers) -> None:
        """Let the plan copy slots for forks."""
        if self.copies.count > 0:
            transfers.copy_states(self.copies.in_order(self.is_filled))

    def note_filled(self, transfers: Transfers) -> None:
        """Note the slots that the plan fills. It releases the blocks that they are restored from."""
        opening = self.opening
        for place in range(opening.count):
            transfers.hold_sources(self.sequences.copy_from[i64(opening.items[place])])
        for place in range(opening.count):
            # From here on nothing makes an object, so nothing can fail.
            row = i64(opening.items[place])
            self.sequences.copy_from[row] = self._nothing
            self.is_filled[row] = 1
        opening.clear()
        if self.copies.count > 0:
            self.copies.clear()
