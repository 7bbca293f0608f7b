"""The blocks that continue a content, found by their first token, for hits that end inside a block."""

from typing import Final

from librt.vecs import vec
from mypy_extensions import i32, i64

from ...ids import NULL_BLOCK
from ..arrays import grown_i32, zeros_i32
from ..tokens import LOW_HALF
from .hashing import HASH_MASK

#: Most blocks with an equal first token that are compared; with more, one popular token would slow every lookup.
MOST_COMPARED: Final[i64] = 32
SPREAD: Final[i64] = 40503


class Continuations:
    """Doubly linked lists of indexed blocks, one per (parent content, first token), latest first.

    O(1) per operation.
    """

    def __init__(self, num_blocks: int) -> None:
        self._first: dict[int, int] = {}
        self._after = zeros_i32(num_blocks)
        self._before = zeros_i32(num_blocks)

    def _key(self, parent: i64, word: i64) -> int:
        """Return the key of a list. Different lists may share one, because candidates are compared anyway."""
        return int((parent * SPREAD * SPREAD + (word & LOW_HALF)) & HASH_MASK)

    def add(self, block: i64, parent: i64, word: i64) -> None:
        """Add a block that continues `parent` and whose first packed word is `word`."""
        key = self._key(parent, word)
        following = i64(self._first.get(key, 0))
        self._first[key] = int(block)
        self._after[block] = i32(following)
        self._before[block] = 0
        if following != NULL_BLOCK:
            self._before[following] = i32(block)

    def remove(self, block: i64, parent: i64, word: i64) -> None:
        """Remove a block."""
        before = i64(self._before[block])
        after = i64(self._after[block])
        if before != NULL_BLOCK:
            self._after[before] = i32(after)
        elif after != NULL_BLOCK:
            self._first[self._key(parent, word)] = int(after)
        else:
            del self._first[self._key(parent, word)]
        if after != NULL_BLOCK:
            self._before[after] = i32(before)

    def clear(self) -> None:
        """Remove all blocks."""
        self._first.clear()

    def enlarge(self, num_blocks: int) -> "Continuations":
        """Return the same lists with room for `num_blocks` blocks. Do not use this object afterwards."""
        larger = Continuations(0)
        larger._first = self._first
        larger._after = grown_i32(self._after, num_blocks)
        larger._before = grown_i32(self._before, num_blocks)
        return larger

    def candidates(self, parent: i64, word: i64) -> list[int]:
        """Return at most 32 blocks that follow `parent` and may begin with this token, latest first."""
        blocks: list[int] = []
        block = i64(self._first.get(self._key(parent, word), 0))
        while block != NULL_BLOCK and len(blocks) < MOST_COMPARED:
            blocks.append(int(block))
            block = i64(self._after[block])
        return blocks


def common_tokens(words: vec[i64], position: i64, other: vec[i64], other_position: i64, limit: i64) -> i64:
    """Return the number of equal leading tokens of two packed rows, at most `limit`. O(limit)."""
    equal: i64 = 0
    while equal < limit:
        difference = words[position + (equal >> 1)] ^ other[other_position + (equal >> 1)]
        if difference & LOW_HALF != 0:
            return equal
        equal += 1
        if equal < limit and difference != 0:
            return equal
        equal += 1
    return limit
