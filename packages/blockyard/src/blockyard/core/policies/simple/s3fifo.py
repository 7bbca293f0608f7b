"""S3-FIFO: a small queue that newcomers have to survive, a main queue, and a memory of those that did not."""

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
    """Yang, Zhang, Qiu, Yue and Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023).

    A new content enters the small queue. At its head, a block that was hit meanwhile moves to the main queue, another
    one is evicted and its key remembered; a content that comes back while it is remembered enters the main queue at
    once. At the head of the main queue a block that was hit goes to the end with one hit less. Blocks in use are in no
    queue: one that becomes idle again goes to the end of the queue it was in, with its hits. O(1) amortised.

    small_percent: share of the idle blocks that the small queue may have before it is the one to give.
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
        """`block` became idle."""
        self._meet(block, key)
        self._queues.append(self._home[block], block)

    def _meet(self, block: i64, key: i64) -> None:
        """A content is new when it becomes idle or is hit for the first time, whichever comes first."""
        if self._key[block] != key + 1:
            self._key[block] = key + 1
            self._hits[block] = 0
            self._home[block] = MAIN if self._ghosts.take(key) >= 0 else SMALL

    def hit(self, block: i64, key: i64) -> None:
        """One hit more."""
        self._meet(block, key)
        self._hits[block] = min(self._hits[block] + 1, MOST_HITS)

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self._queues.remove(block)

    def evict(self) -> i64:
        """The first block of the small queue, while that is large, or of the main queue, that was not hit."""
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
        """No block is idle any more."""
        self._queues.clear()
        self._ghosts.clear()
        self._key = zeros_i64(len(self._key))

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
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
        """The queues are sound. O(num_blocks)."""
        self._queues.check()
