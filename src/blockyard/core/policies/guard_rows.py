"""What a guard keeps of a block and of an exposed content, each in one row, so that an event touches one cache line."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import zeros_i32

#: Words before the first row. A large vec begins 40 bytes into a cache line; two rows of blocks fill a line from here.
FIRST: Final[i64] = 6
#: Words of a row: of a block, and of a ghost, which is a content that only the shadow has.
BLOCK_WORDS: Final[i64] = 8
GHOST_WORDS: Final[i64] = 5

#: Both: the rows after and before it in its list (`shadow_lru`), 0 for none, and the low and high 31 bits of the key.
NEXT: Final[i64] = 0
PREV: Final[i64] = 1
LOW: Final[i64] = 2
HIGH: Final[i64] = 3
#: A ghost: the next in its bucket, or the next free one.
CHAIN: Final[i64] = 4
#: A block (`idle_tree`): the block before it in its sequence, its first child, and its siblings.
PARENT: Final[i64] = 4
CHILD: Final[i64] = 5
AFTER: Final[i64] = 6
BEFORE: Final[i64] = 7


def row_of(block: i64) -> i64:
    """Where the row of a block begins."""
    return FIRST + BLOCK_WORDS * block


def block_of(row: i64) -> i64:
    """The block whose row begins there."""
    return (row - FIRST) >> 3


def first_ghost(num_blocks: i64) -> i64:
    """Where the row of ghost 0 begins, behind those of all blocks."""
    return FIRST + BLOCK_WORDS * num_blocks


def new_rows(num_blocks: int) -> vec[i32]:
    """Empty rows for `num_blocks` blocks and as many ghosts, 52 bytes of each."""
    return zeros_i32(int(FIRST) + int(BLOCK_WORDS + GHOST_WORDS) * num_blocks)
