"""The free queue as people may use it alone: checked, in the calls that vLLM's class of this name has."""

from mypy_extensions import i64

from ...arguments import require_int, shown
from ...cache_options import MAX_BLOCKS
from ...errors import DoubleFree, InvalidArgument, OutOfBlocks
from ...ids import NULL_BLOCK
from ..arrays import zeros_i32, zeros_i64
from ..face import refuse_copy, refuse_pickle, refuse_subclass
from .free_queue import FreeQueue


class FreeKVCacheBlockQueue:
    """Free blocks in eviction order; any of them can leave from the middle in O(1) (vLLM's class, over block ids).

    num_blocks: ids are 1 to num_blocks - 1, all free at first; block 0 is the null block; 2 to 2**27.
    A block that is in the queue cannot be appended, one that is not cannot be removed: each error names it.

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
        """Take the first block. O(1). Raises `OutOfBlocks` when the queue is empty."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: object) -> list[int]:
        """Take the first `n` blocks, in order. O(n). Raises `OutOfBlocks` when there are fewer, and takes none then."""
        count = require_int("n", n, 0, MAX_BLOCKS)
        # Made first: making something can run a finaliser that uses the queue, and the check has to come after it.
        blocks = zeros_i32(min(count, self._num_blocks))
        ids = [0] * len(blocks)
        if count > self._queue.num_free:
            free = self.num_free_blocks
            raise OutOfBlocks(f"n is {count}; only {free} blocks are free", count, free)
        self._queue.popleft_n(blocks, 0, count)
        for index in range(i64(count)):
            self._taken[i64(blocks[index])] = 1
            ids[index] = int(blocks[index])
        return ids

    def remove(self, block_id: object) -> None:
        """Take a free block out, wherever it is. O(1). Raises `InvalidArgument` for one that is not in the queue."""
        block = self._block(block_id)
        if self._taken[block] != 0:
            raise InvalidArgument(f"block_id is {block}; it is not in the queue")
        self._queue.remove(block)
        self._taken[block] = 1

    def append(self, block_id: object) -> None:
        """Make a block the last to be taken. O(1). Raises `DoubleFree` for one that is in the queue."""
        block = self._block(block_id)
        self._require_taken(block)
        self._queue.append(block)
        self._taken[block] = 0

    def append_left(self, block_id: object) -> None:
        """Make a block the next to be taken. O(1). Raises `DoubleFree` for one that is in the queue."""
        block = self._block(block_id)
        self._require_taken(block)
        self._queue.append_left(block)
        self._taken[block] = 0

    def append_n(self, block_ids: object) -> None:
        """Append several, in order, or none. O(n). Raises as `append` does, also for an id that stands there twice."""
        if not isinstance(block_ids, (list, tuple)):
            raise InvalidArgument(f"block_ids is {shown(block_ids)}; it must be a list of block ids")
        ids = [int(self._block(block_id)) for block_id in list(block_ids)]
        if len(set(ids)) != len(ids):
            raise DoubleFree(f"block_ids is {shown(ids)}; each block may stand there once")
        blocks = zeros_i64(len(ids))
        for index, block in enumerate(ids):
            blocks[index] = block
        for index in range(i64(len(blocks))):
            self._require_taken(blocks[index])
        self._queue.append_run(blocks, i64(len(blocks)))
        for index in range(i64(len(blocks))):
            self._taken[blocks[index]] = 0

    def get_all_free_blocks(self) -> list[int]:
        """Return all free blocks, in the order in which they are taken. O(free)."""
        return self._queue.block_ids()

    def _block(self, block_id: object) -> i64:
        return require_int("block_id", block_id, int(NULL_BLOCK) + 1, self._num_blocks - 1)

    def _require_taken(self, block: i64) -> None:
        if self._taken[block] == 0:
            raise DoubleFree(f"block {block} is in the queue already")

    def __init_subclass__(cls) -> None:
        """Refuse: a subclass of a compiled class could not be made."""
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
