"""Finds the longest hit whose last tokens are held by all layer groups with sliding windows."""

from typing import Final

from mypy_extensions import i64

from ...windows import first_needed_block
from .block_trie import BlockTrie, Path

#: A state is only needed at the end of a hit, like the last block of a window of two tokens.
STATE_WINDOW: Final = 2


class WindowGroup:
    """Scans a prompt's path for the blocks that one layer group with a window holds."""

    def __init__(self, trie: BlockTrie, path: Path, holder: i64, window: i64) -> None:
        self._trie = trie
        self._path = path
        self._holder = holder
        self._window = window
        self._block_size: i64 = trie.block_size
        #: First block of the last run of held blocks that was found.
        self._clear: i64 = len(path)
        self.num_tokens: i64 = self._clear * self._block_size

    def shorten(self, length: i64) -> i64:
        """Return `length` if the holder has all blocks of the window before it, else the tokens before the last gap.

        `length` must be whole blocks, at most `num_tokens`, and at most that of the previous call. O(blocks of the
        path) for all calls together, because each block is examined once.
        """
        needed = first_needed_block(length, self._window, self._block_size)
        position = min(self._clear, length // self._block_size)
        while position > needed and self._trie.is_held(i64(self._path.nodes[position - 1]), self._holder):
            position -= 1
        self._clear = position
        return length if position <= needed else (position - 1) * self._block_size


def longest_fit(groups: list[WindowGroup], length: i64, step: i64) -> int:
    """Return the longest length of at most `length` tokens, in whole steps, that every group's window allows.

    O(blocks found) per group at most, and usually the blocks of its window.
    """
    for group in groups:
        length = min(length, group.num_tokens)
    length -= length % step
    while length > 0:
        shortest = length
        for group in groups:
            shortest = min(shortest, group.shorten(length))
        if shortest == length:
            break
        length = shortest - shortest % step
    return int(length)
