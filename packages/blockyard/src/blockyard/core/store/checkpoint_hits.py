"""The checkpoints that prompts hit."""

from mypy_extensions import i32, i64

from ..arrays import zeros_i32
from ..index.prefix_index import PrefixIndex
from ..index.prompt import Hit
from ..sequences.table import SequenceTable
from .content_ledger import FIRST_PART, ContentLedger


class CheckpointHits:
    """Finds the checkpoint that a prompt can continue from, and holds it until the first step has restored it.

    The blocks of a hit are held in `SequenceTable.copy_from`.
    """

    def __init__(self, pool: ContentLedger, sequences: SequenceTable, num_parts: i64, alignment: i64) -> None:
        self.pool = pool
        self.sequences = sequences
        self.num_parts = num_parts
        self.alignment = alignment
        self.block_size: i64 = sequences.block_size
        self._one_state = zeros_i32(int(num_parts))

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
