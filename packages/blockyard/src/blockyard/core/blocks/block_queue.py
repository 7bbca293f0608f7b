"""vLLM's class for a free queue, with checked arguments."""

from mypy_extensions import i64

from ...arguments import require_int, shown
from ...cache_options import MAX_BLOCKS
from ...errors import DoubleFree, InvalidArgument, OutOfBlocks
from ...ids import NULL_BLOCK
from ..arrays import zeros_i32, zeros_i64
from ..face import refuse_copy, refuse_pickle, refuse_subclass
from .free_queue import FreeQueue


class FreeKVCacheBlockQueue:
    """Free blocks in eviction order; removal from the middle is O(1). vLLM's class of this name.

    A block in the queue cannot be appended, and one outside it cannot be removed; each error names the block.

    Args:
        num_blocks: ids are 1 to num_blocks - 1, all free at first; block 0 is the null block; 2 to 2**27.

    >>> queue = FreeKVCacheBlockQueue(6)
    >>> queue.popleft_n(2), queue.num_free_blocks
    ([1, 2], 3)
    >>> queue.remove(4)
    >>> queue.append(1)
    >>> queue.get_all_free_blocks()
    [3, 5, 1]
    """

    def __init__(self, num_blocks: object) -> None:
        self._num_blocks = require_int("num_blocks", num_blocks, 2, MAX_BLOCKS)
        self._queue = FreeQueue(self._num_blocks)
        #: 1 for each block that is taken.
        self._taken = zeros_i32(self._num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Count the blocks in the queue. O(1)."""
        return int(self._queue.num_free)

    def popleft(self) -> int:
        """Take the first block. O(1). Raises `OutOfBlocks` if the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: object) -> list[int]:
        """Take the first `n` blocks, in order. O(n). Raises `OutOfBlocks`, and takes none, if there are fewer."""
        count = require_int("n", n, 0, MAX_BLOCKS)
        # Made first: making something can run a finaliser that uses the queue, and the check has to come after it.
        blocks = zeros_i32(min(count, self._num_blocks))
        ids = [0] * len(blocks)
        if count > self._queue.num_free:
            free = self.num_free_blocks
            raise OutOfBlocks(f"n is {count}; only {free} blocks are free: take fewer", count, free)
        self._queue.popleft_n(blocks, 0, count)
        for index in range(i64(count)):
            self._taken[i64(blocks[index])] = 1
            ids[index] = int(blocks[index])
        return ids

    def remove(self, block_id: object) -> None:
        """Remove a free block from any position. O(1). Raises `InvalidArgument` if it is not in the queue."""
        block = self._block(block_id)
        if self._taken[block] != 0:
            raise InvalidArgument(f"block_id is {block}; it is not in the queue")
        self._queue.remove(block)
        self._taken[block] = 1

    def append(self, block_id: object) -> None:
        """Put a block at the end of the queue. O(1). Raises `DoubleFree` if it is in the queue already."""
        block = self._block(block_id)
        self._require_taken(block)
        self._queue.append(block)
        self._taken[block] = 0

    def append_left(self, block_id: object) -> None:
        """Put a block at the head of the queue. O(1). Raises `DoubleFree` if it is in the queue already."""
        block = self._block(block_id)
        self._require_taken(block)
        self._queue.append_left(block)
        self._taken[block] = 0

    def append_n(self, block_ids: object) -> None:
        """Append several blocks in order, or none.

        O(n). Raises `DoubleFree` for a block that is in the queue already or is given twice.
        """
        if not isinstance(block_ids, (list, tuple)):
            raise InvalidArgument(f"block_ids is {shown(block_ids)}; it must be a list of block ids")
        ids = [int(self._block(block_id)) for block_id in list(block_ids)]
        if len(set(ids)) != len(ids):
            raise DoubleFree(f"block_ids is {shown(ids)}; give each block once")
        blocks = zeros_i64(len(ids))
        for index, block in enumerate(ids):
            blocks[index] = block
        for index in range(i64(len(blocks))):
            self._require_taken(blocks[index])
        self._queue.append_run(blocks, i64(len(blocks)))
        for index in range(i64(len(blocks))):
            self._taken[blocks[index]] = 0

    def get_all_free_blocks(self) -> list[int]:
        """Return all free blocks in order; `popleft` takes the first. O(free)."""
        return self._queue.block_ids()

    def _block(self, block_id: object) -> i64:
        return require_int("block_id", block_id, int(NULL_BLOCK) + 1, self._num_blocks - 1)

    def _require_taken(self, block: i64) -> None:
        if self._taken[block] == 0:
            raise DoubleFree(f"block {block} is in the queue already; remove it first")

    def __init_subclass__(cls) -> None:
        """Refuse subclasses: the class is compiled."""
        raise refuse_subclass("FreeKVCacheBlockQueue")

    def __copy__(self) -> "FreeKVCacheBlockQueue":
        raise refuse_copy("a FreeKVCacheBlockQueue", "make another one")

    def __deepcopy__(self, memo: object) -> "FreeKVCacheBlockQueue":
        raise refuse_copy("a FreeKVCacheBlockQueue", "make another one")

    def __reduce__(self) -> str:
        raise refuse_pickle("a FreeKVCacheBlockQueue", "send its get_all_free_blocks()")

    def check(self) -> None:
        """Verify both directions of the list and the count. O(num_blocks). Raises `InvariantError`."""
        self._queue.check()
