"""Packed tokens of each block, and rings of blocks with equal content."""

from typing import Final

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ...errors import InvariantError
from ..arrays import clear_i32, view_i32, view_i64, words_to_cache_line, zeros_i32, zeros_i64
from ..tokens import unpack_tokens, words_per_block
from .hashing import WORDS_OF_16_TOKENS

#: The link of a single block without a slot in the table, which is found by its neighbour.
FOLLOWS: Final[i32] = -1


class TokenRows:
    """The packed tokens of every block, in rows of `num_words`: row b is `words[first_word + b * num_words:]`.

    Rows of 64 bytes start on cache lines. A row may be written while its block is not indexed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_words: i64 = words_per_block(block_size)
        self.words = zeros_i64(num_blocks * words_per_block(block_size) + 8)
        self.first_word: i64 = words_to_cache_line(self.words)

    def start_of(self, block: i64) -> i64:
        """Return the start of the row of `block` in `words`."""
        return self.first_word + block * self.num_words

    def store(self, words: vec[i64], first: i64, last: i64, blocks: vec[i32], start: i64) -> None:
        """Copy blocks `first` to `last` of a packed prompt into the rows of `blocks[start + first:]`."""
        num_words = self.num_words
        stored = self.words
        start_word = self.first_word
        if num_words == WORDS_OF_16_TOKENS:
            self._store_16(words, first, last, blocks, start)
            return
        source = first * num_words
        for position in range(first, last):
            target = start_word + i64(blocks[start + position]) * num_words
            for word in range(num_words):
                stored[target + word] = words[source + word]
            source += num_words

    def _store_16(self, words: vec[i64], first: i64, last: i64, blocks: vec[i32], start: i64) -> None:
        """Copy blocks of 16 tokens, unrolled."""
        stored = self.words
        start_word = self.first_word
        source = first * WORDS_OF_16_TOKENS
        for position in range(first, last):
            target = start_word + i64(blocks[start + position]) * WORDS_OF_16_TOKENS
            stored[target] = words[source]
            stored[target + 1] = words[source + 1]
            stored[target + 2] = words[source + 2]
            stored[target + 3] = words[source + 3]
            stored[target + 4] = words[source + 4]
            stored[target + 5] = words[source + 5]
            stored[target + 6] = words[source + 6]
            stored[target + 7] = words[source + 7]
            source += WORDS_OF_16_TOKENS

    def copy(self, source: i64, target: i64) -> None:
        """Copy the row of one block to another."""
        words = self.words
        first = self.start_of(source)
        to = self.start_of(target)
        for word in range(self.num_words):
            words[to + word] = words[first + word]

    def equal(self, words: vec[i64], position: i64, block: i64) -> bool:
        """Return whether the row of `block` equals `words[position:]`."""
        stored = self.start_of(block)
        for word in range(self.num_words):
            if self.words[stored + word] != words[position + word]:
                return False
        return True

    def tokens(self, blocks: vec[i32], block_size: int, num_tokens: int) -> npt.NDArray[np.int32]:
        """Return the first `num_tokens` tokens of consecutive blocks, int32 (num_tokens,), a copy."""
        words = view_i64(self.words)[int(self.first_word) :]
        num_rows = len(words) // int(self.num_words)
        rows = words[: num_rows * int(self.num_words)].reshape(num_rows, int(self.num_words))
        return unpack_tokens(rows[view_i32(blocks)], block_size, num_tokens)


class Rings:
    """Equal blocks as doubly linked rings in two arrays, from older to newer. A block without equals has links of 0.

    The table has only the oldest block of a ring, so a thousand equal blocks do not slow a lookup. O(1) per operation.
    """

    def __init__(self, num_blocks: int) -> None:
        self.next_equal = zeros_i32(num_blocks)
        self.prev_equal = zeros_i32(num_blocks)

    def is_alone(self, block: i64) -> bool:
        """Return whether no other indexed block is equal."""
        return self.next_equal[block] <= 0

    def follows(self, block: i64) -> bool:
        """Return whether the block has no slot in the table."""
        return self.next_equal[block] < 0

    def join(self, oldest: i64, block: i64) -> None:
        """Append `block` to the ring of `oldest`."""
        newest = i64(self.prev_equal[oldest])
        if newest == 0:
            newest = oldest
        self.next_equal[newest] = i32(block)
        self.prev_equal[block] = i32(newest)
        self.next_equal[block] = i32(oldest)
        self.prev_equal[oldest] = i32(block)

    def leave(self, block: i64) -> i64:
        """Remove `block` from its ring; return the next newer duplicate, or 0 if there was none."""
        after = i64(self.next_equal[block])
        if after == 0:
            return 0
        before = i64(self.prev_equal[block])
        self.next_equal[block] = 0
        self.prev_equal[block] = 0
        if after == before:
            self.next_equal[after] = 0
            self.prev_equal[after] = 0
        else:
            self.next_equal[before] = i32(after)
            self.prev_equal[after] = i32(before)
        return after

    def members(self, oldest: i64) -> list[int]:
        """Return all blocks of a ring, oldest first. O(duplicates)."""
        ring = [int(oldest)]
        block = i64(self.next_equal[oldest])
        while block > 0 and block != oldest and len(ring) < len(self.next_equal):
            ring.append(int(block))
            if not 0 < block < len(self.next_equal):
                raise InvariantError(
                    f"index: a ring leads to block {block}; the pool has {len(self.next_equal)} blocks"
                )
            block = i64(self.next_equal[block])
        return ring

    def clear(self) -> None:
        """Empty all rings."""
        clear_i32(self.next_equal)
        clear_i32(self.prev_equal)

    def move_into(self, next_equal: vec[i32], prev_equal: vec[i32]) -> None:
        """Replace the arrays by larger ones."""
        self.next_equal = next_equal
        self.prev_equal = prev_equal
