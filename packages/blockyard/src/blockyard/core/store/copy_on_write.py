"""Copy on write: a block that several sequences hold is replaced before one of them writes to it."""

from mypy_extensions import i64

from ...ids import NULL_BLOCK
from ..blocks.ledger import BlockLedger
from ..sequences.block_table import BlockTable


def needs_copy(ledger: BlockLedger, table: BlockTable, row: i64, place: i64, num_published: i64) -> bool:
    """Return whether a row must copy the block at a place before it writes there, because others hold it too.

    Blocks that the row has published are its own to compute, for all who hold them.
    """
    if place < num_published or place >= table.num_blocks[row]:
        return False
    return ledger.ref_cnt[table.block_at(row, place)] > 1


def make_own(ledger: BlockLedger, table: BlockTable, row: i64, place: i64, num_published: i64) -> i64:
    """Make the block at a place a row's own to write. Returns the block that it replaced; 0 if the block stays.

    A block that others hold is replaced; a cached one, of a row that was cut, is uncached.
    """
    if place < num_published or place >= table.num_blocks[row]:
        return NULL_BLOCK
    old = table.block_at(row, place)
    new = ledger.make_writable(old)
    if new == old:
        return NULL_BLOCK
    table.set_block(row, place, new)
    ledger.release_row_block(row, old)
    return old
