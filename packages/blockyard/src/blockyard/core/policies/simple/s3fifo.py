"""The S3-FIFO policy: a small queue for new contents, a main queue, and the keys of evicted new contents."""

from typing import Final

from mypy_extensions import i64

from ...arrays import grown_i64, zeros_i64
from ..base import EvictionPolicy
from ..parts.keys import Ghosts
from ..parts.lists import BlockLists

SMALL: Final[i64] = 0
MAIN: Final[i64] = 1
#: Hits are counted up to 3.
MOST_HITS: Final[i64] = 3


class S3FIFO(EvictionPolicy):
    """S3-FIFO, after Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).

    New contents enter the small queue. At its head, a block that was hit since moves to the main queue; any other is
    evicted and its key remembered. A content that returns while its key is remembered enters the main queue directly.
    At the head of the main queue, a block with hits moves to the end and loses one hit. Blocks in use are in no queue:
    when a block becomes idle again, it is appended to its queue with its hits. O(1) amortised.

    Args:
        num_blocks: blocks of the pool.
        small_percent: percentage of the idle blocks above which the small queue evicts.
    """

    def __init__(self, num_blocks: int, small_percent: i64 = 30) -> None:
        super().__init__(num_blocks)
        self._small_percent = small_percent
        self._queues = BlockLists(2, num_blocks)
        self._ghosts = Ghosts(num_blocks)
        self._key = zeros_i64(num_blocks)
        self._hits = zeros_i64(num_blocks)
        #: The queue a content belongs to while its block is in use; -1 for none.
        self._home = zeros_i64(num_blocks)

    def insert(self, block: i64, key: i64, depth: i64) -> None:  # noqa: ARG002
        self._meet(block, key)
        self._queues.append(self._home[block], block)

    def _meet(self, block: i64, key: i64) -> None:
        """Set the queue of a block with new content, when it becomes idle or is hit for the first time."""
        if self._key[block] != key + 1:
            self._key[block] = key + 1
            self._hits[block] = 0
            self._home[block] = MAIN if self._ghosts.take(key) >= 0 else SMALL

    def hit(self, block: i64, key: i64) -> None:
        self._meet(block, key)
        self._hits[block] = min(self._hits[block] + 1, MOST_HITS)

    def remove(self, block: i64) -> None:
        self._queues.remove(block)

    def evict(self) -> i64:
        """Evict the first block without hits, from the small queue if it is too long, else from the main queue."""
        while True:
            small = self._queues.length[SMALL]
            main = self._queues.length[MAIN]
            if main == 0 or (small > 0 and small * 100 > (small + main) * self._small_percent):
                block = self._queues.pop(SMALL)
                if self._hits[block] == 0:
                    self._ghosts.remember(self._key[block] - 1, 0)
                    return self._forget(block)
                self._hits[block] = 0
                self._home[block] = MAIN
                self._queues.append(MAIN, block)
            else:
                block = self._queues.pop(MAIN)
                if self._hits[block] == 0:
                    return self._forget(block)
                self._hits[block] -= 1
                self._queues.append(MAIN, block)

    def _forget(self, block: i64) -> i64:
        self._key[block] = 0
        return block

    def clear(self) -> None:
        self._queues.clear()
        self._ghosts.clear()
        self._key = zeros_i64(len(self._key))

    def grow(self, num_blocks: int) -> None:
        key = grown_i64(self._key, num_blocks)
        hits = grown_i64(self._hits, num_blocks)
        home = grown_i64(self._home, num_blocks)
        self._queues.grow(num_blocks)
        super().grow(num_blocks)
        self._key = key
        self._hits = hits
        self._home = home
        self._ghosts.capacity = num_blocks

    def check(self) -> None:
        self._queues.check()
