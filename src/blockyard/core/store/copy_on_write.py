"""Copy on write: the block that a row is about to write into becomes its own first (I7)."""

from mypy_extensions import i64

from ...ids import NULL_BLOCK
from ..pool.ledger import BlockLedger
from ..sequences.block_table import BlockTable


def needs_copy(ledger: BlockLedger, table: BlockTable, row: i64, place: i64, num_published: i64) -> bool:
    """Return whether writing into the block at a place needs a copy: others hold it too.

    What the row published it is about to compute itself, for all who hold it.
    """
    if place < num_published or place >= table.num_blocks[row]:
        return False
    return ledger.ref_cnt[table.block_at(row, place)] > 1


def make_own(ledger: BlockLedger, table: BlockTable, row: i64, place: i64, num_published: i64) -> i64:
    """Let nobody else read what the row writes into the block at a place. Returns the block that it was, 0 if it stays.

    A block that others hold is replaced by a new one; one that is cached, of a row that was cut, leaves the index.
    """
    if place < num_published or place >= table.num_blocks[row]:
        return NULL_BLOCK
    old = table.block_at(row, place)
    new = ledger.writable(old)
    if new == old:
        return NULL_BLOCK
    table.set_block(row, place, new)
    ledger.give_back_one(row, old, NULL_BLOCK)
    return old
