"""A ledger whose blocks are known by the content they hold, and for which layer group, not by their tokens."""

from typing import Final

from mypy_extensions import i64

from ...ids import NULL_BLOCK
from ..arrays import zeros_i64
from ..pool.ledger import BlockLedger

#: A content id and a group number are two words, which the index takes for four tokens.
ENTRY_TOKENS: Final = 4
ENTRY_WORDS: Final[i64] = 2


class ContentPool(BlockLedger):
    """Blocks of keys and values below token blocks.

    With several layer groups, or a CPU pool, one content (the tokens of a token block after all before them) is stored
    in several places. The token blocks, a `BlockLedger` without keys and values, verify a prompt's tokens and give each
    its content id, which is never used twice. Here the same exact index is used once more, over two words instead of a
    block's tokens: (content id, group) → the blocks that hold it.
    """

    def __init__(self, num_blocks: int, hash_seed: int, tokens_per_block: int) -> None:
        super().__init__(num_blocks, tokens_per_block, ENTRY_TOKENS, True, hash_seed)
        self.knows_tokens = False
        self._entry = zeros_i64(int(ENTRY_WORDS))
        self._root: i64 = self.index.root(())

    def find_content(self, content: i64, group: i64) -> i64:
        """The oldest block that holds `content` for `group`, or 0. O(1) expected."""
        self._entry[0] = content
        self._entry[1] = group
        index = self.index
        return index.find(self._entry, 0, index.hash_words(self._entry, self._root), self._root)

    def cache_content(self, block: i64, content: i64, group: i64) -> None:
        """Index `block`, which is held and not indexed, as holding `content` for `group`. O(1) expected."""
        index = self.index
        first = index.rows.start_of(block)
        index.rows.words[first] = content
        index.rows.words[first + 1] = group
        self._entry[0] = content
        self._entry[1] = group
        index.insert(block, index.hash_words(self._entry, self._root), self._root, NULL_BLOCK)

    def content_of(self, block: i64) -> i64:
        """The content that an indexed block holds."""
        return self.index.rows.words[self.index.rows.start_of(block)]

    def group_of(self, block: i64) -> i64:
        """The group that an indexed block holds its content for."""
        return self.index.rows.words[self.index.rows.start_of(block) + 1]

    def is_cached(self, block: i64) -> bool:
        """Whether the block is indexed."""
        return self.index.is_cached(block)

    def reset(self) -> None:
        """Forget all cached content at once; blocks stay with their holders. O(num_blocks)."""
        super().reset()
        self._root = self.index.root(())
