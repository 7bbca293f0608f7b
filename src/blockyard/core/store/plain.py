"""The store of a cache with one layer group, no window and no CPU pool: its token blocks hold keys and values."""

from mypy_extensions import i64

from ..index.hit import Hit
from ..pool.ledger import BlockLedger
from ..sequences.joins import Joins
from ..sequences.table import SequenceTable
from .base import Store, needs_copy
from .transfers import Transfers


class PlainStore(Store):
    """What is hashed is what is stored, so a block is shared as soon as it is indexed and the rows are the table."""

    def __init__(self, token_blocks: BlockLedger, sequences: SequenceTable, joins: Joins) -> None:
        super().__init__(token_blocks, token_blocks, sequences, [sequences])
        self.joins = joins
        self.shares_at_once = token_blocks.enable_prefix_caching

    def limit(self, hit: Hit) -> None:
        """Computed blocks, then those that one sequence has yet to compute."""
        self.joins.limit(hit, self.token_blocks.ref_cnt)
        hit.num_known = hit.num_usable

    def num_needed(self, hit: Hit, num_tokens: i64) -> i64:
        """New blocks and idle hits. O(hit)."""
        idle = self.token_blocks.count_idle(hit.blocks, hit.num_usable)
        return self.num_token_blocks(num_tokens) - hit.num_usable + idle

    def num_least(self, num_tokens: i64) -> i64:
        """All blocks of the prompt."""
        return self.num_token_blocks(num_tokens)

    def num_partial(self, num_tokens: i64) -> i64:
        """1 unless the last block is full."""
        return 1 if num_tokens % self.block_size != 0 else 0

    def taken_by(self, hit: Hit) -> list[int]:
        """The usable blocks."""
        return [int(hit.blocks[position]) for position in range(hit.num_usable)]

    def evict_ahead(self, row: i64, num_tokens: i64) -> None:
        """As many victims as the row lacks blocks."""
        self.kv_pool.evict_ahead(self.num_token_blocks(num_tokens) - self.sequences.num_blocks[row])

    def blocks_of(self, token_block: i64) -> list[int]:
        """The block itself."""
        return [int(token_block)]

    def cached_for(self, token_block: i64) -> list[int]:
        """The block itself."""
        return [int(token_block)]

    def num_missing(self, row: i64, start: i64, end: i64) -> i64:
        """Blocks behind the last one, and a copy of a shared one."""
        missing = max(self.num_token_blocks(end) - self.sequences.num_blocks[row], 0)
        return missing + self.num_copies(row, start)

    def num_copies(self, row: i64, start: i64) -> i64:
        """1 if the block at token `start` is held by others too and this sequence has not published it."""
        sequences = self.sequences
        place = start // self.block_size
        return 1 if needs_copy(self.token_blocks, sequences, row, place, sequences.num_published[row]) else 0

    def token_block_copied(self, source: i64, target: i64, transfers: Transfers) -> None:
        """Its keys and values are copied with it."""
        transfers.copy(source, target, 0)
        self.num_copied_blocks += 1

    def note_ready(self, row: i64) -> None:
        """As far as its blocks reach, unless others wait for what it computes."""
        sequences = self.sequences
        if sequences.num_waiters[row] == 0:
            sequences.ready[row] = sequences.num_blocks[row] * self.block_size
