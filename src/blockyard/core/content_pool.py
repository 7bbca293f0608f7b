"""A pool whose blocks are known by the content they hold, and for which layer group, not by their tokens."""

from typing import Final

from mypy_extensions import i64

from ..arguments import require_int
from ..errors import InvalidArgument
from ..ids import NO_CONTENT
from .arrays import zeros_i64
from .block import KVCacheBlock
from .block_pool import BlockPool

#: A content id and a group number are two words, which the index takes for four tokens.
ENTRY_TOKENS: Final = 4
ENTRY_WORDS: Final[i64] = 2


class ContentPool(BlockPool):
    """Blocks of keys and values under a page table of contents.

    With several layer groups, or a CPU pool, one content (the tokens of a page after all before them) is stored
    in several places. The pages, a `BlockPool` without keys and values, prove a prompt's tokens and give each page
    its content id, which is never used twice. Here the exact index of the pages is used once more, over two words
    instead of a block's tokens: (content id, group) → the blocks that hold it.
    """

    def __init__(self, num_blocks: int, hash_seed: int, tokens_per_block: int) -> None:
        super().__init__(num_blocks, ENTRY_TOKENS, True, hash_seed)
        self.block_size = tokens_per_block
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
        first = index.first_word + block * ENTRY_WORDS
        index.words[first] = content
        index.words[first + 1] = group
        self._entry[0] = content
        self._entry[1] = group
        index.insert(block, index.hash_words(self._entry, self._root), self._root)

    def content_of(self, block: i64) -> i64:
        """The content that an indexed block holds."""
        return self.index.words[self.index.first_word + block * ENTRY_WORDS]

    def group_of(self, block: i64) -> i64:
        """The group that an indexed block holds its content for."""
        return self.index.words[self.index.first_word + block * ENTRY_WORDS + 1]

    def is_cached(self, block: i64) -> bool:
        """Whether the block is indexed."""
        return self.index.identity[2 * block] != NO_CONTENT

    def reset(self) -> None:
        """Forget all cached content at once; blocks stay with their holders. O(num_blocks)."""
        super().reset()
        self._root = self.index.root(())

    def block(self, block_id: object) -> KVCacheBlock:
        """One block as people see it; its tokens are known to the manager alone. O(leases)."""
        number = require_int("block_id", block_id, 0, int(self.capacity) - 1)
        block = i64(number)
        return KVCacheBlock(
            number,
            int(self.ref_cnt[block]),
            [],
            int(self.index.chain_hash[block]) if self.is_cached(block) else None,
            True,
            [lease.holder for lease in self.leases() if number in list(lease)],
        )

    def _require_tokens(self) -> None:
        raise InvalidArgument("this pool belongs to a manager with layer groups or a CPU pool; ask the manager")
