"""The working states of running sequences: one slot a row, outside of the pool, and the checkpoints that fill it."""

from mypy_extensions import i32, i64

from ..arrays import zeros_i32, zeros_i64
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Hit
from ..sequences.table import SequenceTable
from .content_ledger import FIRST_PART, ContentLedger
from .slot_copies import SlotCopies
from .transfers import Numbers, Transfers


class WorkingStates:
    """Finds the checkpoint that a prompt can hit, holds it, and lets the first step of a row restore it to the slot.

    Only row n writes slot n. The blocks of a hit are held in `SequenceTable.copy_from` until a plan restores them.

    Attributes:
        is_filled: by row, 1 once a plan has filled its slot.
        opening: rows whose slots the next plan fills.
        copies: slots that the next plan copies to others, for forks.
    """

    def __init__(self, pool: ContentLedger, sequences: SequenceTable, num_parts: i64, alignment: i64) -> None:
        self.pool = pool
        self.sequences = sequences
        self.num_parts = num_parts
        self.alignment = alignment
        self.block_size: i64 = sequences.block_size
        rows = int(sequences.max_num_seqs)
        self.is_filled = zeros_i64(rows)
        self.opening = Numbers()
        self.copies = SlotCopies(rows)
        self._nothing: list[int] = []
        self._one_state = zeros_i32(int(num_parts))

    # Hits.

    def find(self, content: i64) -> list[int]:
        """Return the blocks of the checkpoint after a content; none unless all of them are cached. O(parts)."""
        found = self.pool.find_parts(content, FIRST_PART, self.num_parts)
        return [int(block) for block in found] if len(found) == self.num_parts else []

    def reach(self, index: PrefixIndex, hit: Hit, limit: i64) -> i64:
        """Return the longest position up to `limit` with a checkpoint, and note its blocks. O(blocks + parts)."""
        position = limit - limit % self.alignment
        while position > 0:
            hit.state = self.find(index.content_of(i64(hit.blocks[position // self.block_size - 1])))
            if hit.state:
                return position
            position -= self.alignment
        return 0

    def num_idle(self, hit: Hit) -> i64:
        """Return how many blocks of a hit's checkpoint are idle."""
        idle: i64 = 0
        for block in hit.state:
            idle += 1 if self.pool.ref_cnt[i64(block)] == 0 else 0
        return idle

    def hold(self, row: i64, hit: Hit) -> None:
        """Hold the checkpoint of a hit until the first step has restored it."""
        parts = self._one_state
        count: i64 = 0
        for block in hit.state:
            parts[count] = i32(block)
            count += 1
        self.pool.share_hits(parts, 0, count)
        self.sequences.copy_from[row] = hit.state

    def unhold(self, row: i64) -> None:
        """Undo the latest `hold`."""
        for block in reversed(self.sequences.copy_from[row]):
            self.pool.unshare_one(block)
        self.sequences.copy_from[row] = []

    # Slots.

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
