"""Charges each block of a pool to the tenant that takes it."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..policies.layers.shares import TenantBook
from .ledger import BlockLedger
from .observer import PoolObserver


class Charges(PoolObserver):
    """It keeps a `TenantBook` for a ledger: what is held is charged once, however many sequences hold it."""

    def __init__(self, ledger: BlockLedger, book: TenantBook) -> None:
        self.ledger = ledger
        self.book = book

    def acquired(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """They are the acting tenant's."""
        book = self.book
        for position in range(start, start + count):
            book.of_block[i64(blocks[position])] = book.acting
            book.is_held[i64(blocks[position])] = 1
        book.hold(book.acting, count)
        book.taken(book.acting, count)

    def shared(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Charge those again that were idle."""
        book = self.book
        for position in range(start, start + count):
            block = i64(blocks[position])
            if book.is_held[block] == 0:
                book.is_held[block] = 1
                book.hold(book.of_block[block], 1)

    def evicting(self, block: i64) -> None:
        """Count it for the tenant that loses it."""
        self.book.num_evicted[self.book.of_block[block]] += 1

    def released(self, blocks: vec[i32], start: i64, count: i64) -> None:
        """Take those off that are not held any more."""
        book = self.book
        for position in range(start, start + count):
            block = i64(blocks[position])
            if self.ledger.ref_cnt[block] == 0 and book.is_held[block] != 0:
                book.is_held[block] = 0
                book.hold(book.of_block[block], -1)
