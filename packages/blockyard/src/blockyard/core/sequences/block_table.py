"""Rows of block ids: the blocks of each sequence, in order."""

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import zeros_i32, zeros_i64


class BlockTable:
    """`max_num_seqs` rows of `width` block ids. The first `num_blocks` of a row are in use, the rest are 0.

    A reader that has seen a row only needs its later blocks, and the positions that became null since. If the row was
    changed in another way, `num_rewrites` has grown.

    Attributes:
        blocks: all rows, concatenated, int32 (max_num_seqs * width).
        num_blocks: blocks of each row, int64 (max_num_seqs,).
        block_size: tokens per block.
        version: number of changes of the cache; plans compare it to detect that they are stale. Only the table of a
            cache's sequences, or the first table of a copy, counts it.
    """

    def __init__(self, max_num_seqs: int, width: int, block_size: int) -> None:
        self.max_num_seqs: i64 = max_num_seqs
        self.width: i64 = width
        self.block_size: i64 = block_size
        self.blocks = zeros_i32(max_num_seqs * width)
        self.num_blocks = zeros_i64(max_num_seqs)
        #: Leading null blocks of each row, before a sliding window.
        self.num_null = zeros_i64(max_num_seqs)
        self.num_rewrites = zeros_i64(max_num_seqs)
        #: The last block of a row and the position of its first token, when the row was last marked as ready.
        self.tail = zeros_i64(max_num_seqs)
        self.tail_at = zeros_i64(max_num_seqs)
        self.version: i64 = 0

    def row_blocks(self, row: i64) -> vec[i32]:
        """Return a copy of a row's block ids, in order."""
        first = row * self.width
        return self.blocks[first : first + self.num_blocks[row]]

    def block_at(self, row: i64, position: i64) -> i64:
        """Return the block id at a logical position of a row."""
        return i64(self.blocks[row * self.width + position])

    def note_tail(self, row: i64) -> None:
        """Record a row's last block, which the next tokens are written to. O(1)."""
        place = self.num_blocks[row] - 1
        self.tail[row] = i64(self.blocks[row * self.width + place])
        self.tail_at[row] = place * self.block_size

    def set_block(self, row: i64, position: i64, block: i64) -> None:
        """Write a block id at a logical position of a row."""
        self.blocks[row * self.width + position] = i32(block)
        self.num_rewrites[row] += 1

    def clear_front(self, row: i64, num_null: i64) -> None:
        """Replace the first `num_null` blocks of a row by the null block."""
        for position in range(self.num_null[row], num_null):
            self.blocks[row * self.width + position] = 0
        self.num_null[row] = num_null

    def put_blocks(self, row: i64, blocks: vec[i32], count: i64) -> None:
        """Replace a row by the first `count` of `blocks`."""
        first = row * self.width
        for position in range(count):
            self.blocks[first + position] = blocks[position]
        self.num_blocks[row] = count
        self.num_rewrites[row] += 1

    def copy_blocks(self, row: i64, other: i64, count: i64) -> None:
        """Replace row `other` by the first `count` blocks of `row`."""
        first = row * self.width
        for position in range(count):
            self.blocks[other * self.width + position] = self.blocks[first + position]
        self.num_blocks[other] = count
        self.num_rewrites[other] += 1

    def push_block(self, row: i64, block: i64) -> None:
        """Append a block id to a row."""
        self.blocks[row * self.width + self.num_blocks[row]] = i32(block)
        self.num_blocks[row] += 1

    def cut_row(self, row: i64, keep: i64) -> None:
        """Remove the block ids after the first `keep`, leaving zeros."""
        first = row * self.width
        for position in range(first + keep, first + self.num_blocks[row]):
            self.blocks[position] = 0
        self.num_blocks[row] = keep
        self.num_rewrites[row] += 1

    def map_slots(self, rows: vec[i64], starts: vec[i64], counts: vec[i64], slots: vec[i64]) -> i64:
        """Write the slots of tokens `starts` to `starts + counts` of each row to `slots`; return their number."""
        filled: i64 = 0
        for index in range(i64(len(rows))):
            if counts[index] == 1:
                slots[filled] = self.slot_of(rows[index], starts[index])
            else:
                self.map_run(rows[index], starts[index], starts[index] + counts[index], slots, filled)
            filled += counts[index]
        return filled

    def slot_of(self, row: i64, position: i64) -> i64:
        """Return the slot of one token. No division is needed for a decoded token, which is in the last block."""
        logical = self.num_blocks[row] - 1
        if position < logical * self.block_size:
            logical = position // self.block_size
        return (i64(self.blocks[row * self.width + logical]) - logical) * self.block_size + position

    def map_run(self, row: i64, position: i64, end: i64, slots: vec[i64], filled: i64) -> None:
        """Write the slots of tokens `position` to `end` of one row into `slots[filled:]`. O(tokens)."""
        blocks = self.blocks
        first = row * self.width
        block_size = self.block_size
        while position < end:
            logical = position // block_size
            stop = min(end, (logical + 1) * block_size)
            slot = (i64(blocks[first + logical]) - logical) * block_size + position
            while position < stop:
                slots[filled] = slot
                filled += 1
                slot += 1
                position += 1
