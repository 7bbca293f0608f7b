"""The packed tokens of every block, a row each."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import view_i32, view_i64, words_to_cache_line, zeros_i64
from ..tokens import unpack_tokens, words_per_block
from .hashing import WORDS_OF_16_TOKENS


class TokenRows:
    """Row b is `words[first_word + b * num_words:]`, `num_words` long; rows of 64 bytes start on cache lines.

    A row may be written while its block is not indexed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_words: i64 = words_per_block(block_size)
        self.words = zeros_i64(num_blocks * words_per_block(block_size) + 8)
        self.first_word: i64 = words_to_cache_line(self.words)

    def start_of(self, block: i64) -> i64:
        """Where the row of `block` begins in `words`."""
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
        """The same for blocks of 16 tokens, written out."""
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
        """Whether the row of `block` equals `words[position:]`."""
        stored = self.start_of(block)
        for word in range(self.num_words):
            if self.words[stored + word] != words[position + word]:
                return False
        return True

    def tokens(self, blocks: vec[i32], block_size: int, num_tokens: int) -> npt.NDArray[np.int32]:
        """The first `num_tokens` tokens of a run of blocks, int32 (num_tokens,), a copy."""
        words = view_i64(self.words)[int(self.first_word) :]
        num_rows = len(words) // int(self.num_words)
        rows = words[: num_rows * int(self.num_words)].reshape(num_rows, int(self.num_words))
        return unpack_tokens(rows[view_i32(blocks)], block_size, num_tokens)
