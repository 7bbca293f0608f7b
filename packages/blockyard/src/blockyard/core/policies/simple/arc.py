"""The ARC policy: two lists, by recency and frequency, with a balance that adapts to evictions made too early."""

from typing import Final

from mypy_extensions import i64

from ...arrays import grown_i64, zeros_i64
from ..base import EvictionPolicy
from ..parts.keys import Ghosts
from ..parts.lists import BlockLists

ONCE: Final[i64] = 0
OFTEN: Final[i64] = 1


class ARC(EvictionPolicy):
    """Adaptive replacement cache: two lists of idle blocks, with a balance that learns.

    After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). Idle blocks requested
    once and idle blocks requested more often are in two lists, each in order of last use. The keys of blocks evicted
    from either list are remembered. If a content evicted from the first list returns, the target length of that list
    grows; if it was evicted from the second, the target shrinks.

    Two things differ from the paper, because blocks in use cannot be evicted and are in neither list: only idle blocks
    are balanced, and a block joins its list when it becomes idle, not when it is requested. O(1) per operation.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._lists = BlockLists(2, num_blocks)
        self._ghosts_once = Ghosts(num_blocks)
        self._ghosts_often = Ghosts(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._is_often = zeros_i64(num_blocks)
        #: Target number of idle blocks requested once.
        self._target: i64 = 0

    def insert(self, block: i64, key: i64, depth: i64) -> None:  # noqa: ARG002
        self._meet(block, key)
        self._lists.append(self._is_often[block], block)

    def _meet(self, block: i64, key: i64) -> None:
        """Set the list of a block with new content, when it becomes idle or is hit for the first time."""
        if self._key[block] != key + 1:
            self._key[block] = key + 1
            self._is_often[block] = self._learn(key)

    def _learn(self, key: i64) -> i64:
        """Adjust the target if the content was evicted before. Return the list that it belongs to."""
        once = i64(len(self._ghosts_once))
        often = i64(len(self._ghosts_often))
        if self._ghosts_once.take(key) >= 0:
            self._target = min(self._target + max(often // max(once, 1), 1), self.num_blocks)
            return OFTEN
        if self._ghosts_often.take(key) >= 0:
            self._target = max(self._target - max(once // max(often, 1), 1), 0)
            return OFTEN
        return ONCE

    def hit(self, block: i64, key: i64) -> None:
        self._meet(block, key)
        self._is_often[block] = OFTEN

    def remove(self, block: i64) -> None:
        self._lists.remove(block)

    def evict(self) -> i64:
        """Evict the least recently used block of the list that is longer than its target."""
        once = self._lists.length[ONCE]
        from_once = once > 0 and (once > self._target or self._lists.length[OFTEN] == 0)
        block = self._lists.pop(ONCE if from_once else OFTEN)
        ghosts = self._ghosts_once if from_once else self._ghosts_often
        ghosts.remember(self._key[block] - 1, 0)
        self._key[block] = 0
        return block

    def clear(self) -> None:
        self._lists.clear()
        self._ghosts_once.clear()
        self._ghosts_often.clear()
        self._key = zeros_i64(len(self._key))
        self._target = 0

    def grow(self, num_blocks: int) -> None:
        key = grown_i64(self._key, num_blocks)
        is_often = grown_i64(self._is_often, num_blocks)
        self._lists.grow(num_blocks)
        super().grow(num_blocks)
        self._key = key
        self._is_often = is_often
        self._ghosts_once.capacity = num_blocks
        self._ghosts_often.capacity = num_blocks

    def check(self) -> None:
        self._lists.check()
