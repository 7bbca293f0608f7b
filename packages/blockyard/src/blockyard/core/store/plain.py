"""The store of a cache with one layer group, no window, no states and no CPU pool."""

from mypy_extensions import i64

from ..blocks.ledger import BlockLedger
from ..index.prompt import Hit
from ..sequences.joins import Joins
from ..sequences.table import SequenceTable
from .base import Store
from .copy_on_write import needs_copy
from .transfers import Transfers


class PlainStore(Store):
    """Token blocks hold keys and values themselves, so a block is shared as soon as it is indexed."""

    def __init__(self, token_blocks: BlockLedger, sequences: SequenceTable, joins: Joins) -> None:
        super().__init__(token_blocks, token_blocks, sequences, [sequences], [], [])
        self.joins = joins
        self.shares_at_once = token_blocks.enable_prefix_caching

    def limit(self, hit: Hit) -> None:
        """Take computed blocks, then those that one other sequence has yet to compute."""
        self.joins.limit(hit, self.token_blocks.ref_cnt)
        hit.num_known = hit.num_usable

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        idle = self.token_blocks.count_idle(hit.blocks, hit.num_usable)
        return self.num_token_blocks(num_tokens) - hit.num_usable + idle

    def num_least(self, num_tokens: i64) -> i64:
        return self.num_token_blocks(num_tokens)

    def num_partial(self, num_tokens: i64) -> i64:
        return 1 if num_tokens % self.block_size != 0 else 0

    def taken_by(self, hit: Hit) -> list[int]:
        return [int(hit.blocks[position]) for position in range(hit.num_usable)]

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        self.kv_pool.evict_ahead(self.num_token_blocks(num_tokens) - self.sequences.num_blocks[row])

    def blocks_of(self, token_block: i64) -> list[int]:
        return [int(token_block)]

    def cached_for(self, token_block: i64) -> list[int]:
        return [int(token_block)]

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        missing = max(self.num_token_blocks(end) - self.sequences.num_blocks[row], 0)
        return missing + self.num_copies(row, start)

    def num_copies(self, row: i64, start: i64) -> i64:
        sequences = self.sequences
        place = start // self.block_size
        return 1 if needs_copy(self.token_blocks, sequences, row, place, sequences.num_published[row]) else 0

    def num_most(self, num_rows: i64, num_tokens: i64) -> i64:
        return num_tokens // self.block_size + 2 * num_rows

    def grow_groups(self, row: i64, start: i64, end: i64, transfers: Transfers) -> bool:  # noqa: ARG002
        return True

    def note_ready(self, row: i64) -> None:
        """Let the row write as far as its blocks reach, unless others wait for its tokens."""
        sequences = self.sequences
        if sequences.num_waiters[row] == 0:
            sequences.ready[row] = sequences.num_blocks[row] * self.block_size
            sequences.note_tail(row)
