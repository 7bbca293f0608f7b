"""What policies have in common that give each idle block a number and evict the lowest."""

from mypy_extensions import i64

from ..arrays import clear_i64, grown_i64, zeros_i64
from .base import EvictionPolicy
from .block_heap import BlockHeap


class HeapPolicy(EvictionPolicy):
    """Keeps idle blocks in a heap by `priority`; among equals the one idle longest goes first. O(log n).

    A subclass says what a block's priority is when it becomes idle. A block whose key differs from the last one it was
    inserted with holds a new content (`is_new`).
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.heap = BlockHeap(num_blocks)
        #: The key with which each block was last inserted; 0 before the first time.
        self.last_key = zeros_i64(num_blocks)

    def priority(self, block: i64, key: i64, depth: i64) -> i64:
        """The priority of a block that becomes idle; the lowest goes first."""
        raise NotImplementedError

    def is_new(self, block: i64, key: i64) -> bool:
        """Whether the block's content became idle for the first time."""
        return self.last_key[block] != key + 1

    def insert(self, block: i64, key: i64, depth: i64) -> None:
        """`block` became idle."""
        self.heap.insert(block, self.priority(block, key, depth))
        self.last_key[block] = key + 1

    def remove(self, block: i64) -> None:
        """The idle `block` was revived."""
        self.heap.remove(block)

    def evict(self) -> i64:
        """The idle block of the lowest priority."""
        block = self.heap.pop()
        self.last_key[block] = 0
        return block

    def clear(self) -> None:
        """No block is idle any more."""
        self.heap.clear()
        clear_i64(self.last_key)

    def grow(self, num_blocks: int) -> None:
        """Ids now go up to num_blocks - 1."""
        last_key = grown_i64(self.last_key, num_blocks)
        self.heap.grow(num_blocks)
        super().grow(num_blocks)
        self.last_key = last_key

    def check(self) -> None:
        """The heap is sound. O(num_blocks)."""
        self.heap.check()
