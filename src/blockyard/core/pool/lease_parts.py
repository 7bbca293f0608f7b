"""Leases that grow, are parted, and release some of their blocks."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NO_CONTENT, NULL_BLOCK
from ..arrays import zeros_i32
from .lease import BlockLease, LeaseBook, held_blocks
from .ledger import BlockLedger

#: A lease that grows gets room for half as many blocks again and a few, so that a block costs the same at any length.
FEW_BLOCKS: Final[i64] = 4


def grow(ledger: BlockLedger, lease: BlockLease, count: i64) -> vec[i32]:
    """Take `count` blocks, which must be free, behind those of a lease; returns them. Amortised O(count).

    Raises `PolicyError` and changes nothing.
    """
    blocks = lease._blocks
    first = lease._count
    if first + count > len(blocks):
        blocks = zeros_i32(int(max(first + count, first + first // 2 + FEW_BLOCKS)))
        for position in range(first):
            blocks[position] = lease._blocks[position]
    ledger.evict_ahead(count)
    ledger.acquire(blocks, first, count)
    lease._blocks = blocks
    lease._count = first + count
    return blocks[first : first + count]


def part_of(book: LeaseBook, lease: BlockLease, first: i64, last: i64, holder: str) -> BlockLease:
    """A lease on the blocks at `first` to `last` of another, which are not counted for it yet. O(last - first)."""
    part = book.make(lease._blocks[first:last], holder)
    if lease._num_null > 0:
        for position in range(part._count):
            if part._blocks[position] == NULL_BLOCK:
                part._num_null += 1
    part._first_block = lease._first_block + first
    part._num_cached = max(min(lease._num_cached - first, part._count), 0)
    part._num_sure = max(min(lease._num_sure - first, part._count), 0)
    part._losses = lease._losses
    _anchor_at(book.ledger, part, lease, first)
    return part


def _anchor_at(ledger: BlockLedger, part: BlockLease, lease: BlockLease, position: i64) -> None:
    """Let the beginning of `part` know what stands before the block at `position` of `lease`, if that is known.

    A block that is released may be the last of what was cached; its content is known under its number all the same.
    """
    block = i64(lease._blocks[position - 1]) if position > 0 else NULL_BLOCK
    if block != NULL_BLOCK and position <= lease._num_sure:
        ledger.index.give_slot(block)
        part._before = ledger.index.content_of(block)
        part._before_hash = ledger.index.chain_hash[block]
    elif lease._anchor == position:
        part._before = lease._before
        part._before_hash = lease._before_hash
    elif lease._anchor > position:
        part._anchor = lease._anchor - position
        part._before = lease._before
        part._before_hash = lease._before_hash


def cut_off(book: LeaseBook, lease: BlockLease, position: i64, holder: str) -> BlockLease:
    """Let the blocks from `position` on be another lease's. O(blocks of that)."""
    tail = part_of(book, lease, position, lease._count, holder)
    lease._count = position
    lease._num_null -= tail._num_null
    lease._num_cached = min(lease._num_cached, position)
    lease._num_sure = min(lease._num_sure, position)
    if lease._anchor > position:
        lease._anchor = 0
        lease._before = NO_CONTENT
    return tail


def give_back(ledger: BlockLedger, lease: BlockLease, first: i64, last: i64) -> int:
    """Release the blocks at `first` to `last`; the null block takes their places. O(last - first)."""
    blocks = lease._blocks
    end = lease._num_cached
    if first < end <= last and blocks[end - 1] != NULL_BLOCK:
        # What is cached next comes behind this one, though it is no longer held.
        is_sure = end == lease._num_sure
        lease._anchor = end
        ledger.index.give_slot(i64(blocks[end - 1]))
        lease._before = ledger.index.content_of(i64(blocks[end - 1])) if is_sure else NO_CONTENT
        lease._before_hash = ledger.index.chain_hash[i64(blocks[end - 1])]
    held = held_blocks(lease, first, last)
    before = i64(blocks[first - 1]) if first > 0 and first < last and blocks[first] != NULL_BLOCK else NULL_BLOCK
    for position in range(first, last):
        blocks[position] = 0
    lease._num_null += i64(len(held))
    if before != NULL_BLOCK:
        ledger.release(held, 1, i64(len(held)) - 1)
        ledger.note_parent(i64(held[0]), before)
        ledger.release(held, 0, 1)
    else:
        ledger.release(held, 0, len(held))
    return len(held)


def adopt(book: LeaseBook, blocks: vec[i32], holder: str) -> BlockLease:
    """A lease on these blocks, which must be free. O(blocks)."""
    lease = book.make(blocks, holder)
    book.ledger.take(blocks)
    return lease
