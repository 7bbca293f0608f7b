"""What is cached, read a slice at a time: who follows whom, under which keys, and the tokens of a few blocks."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import view_i64
from .prefix_index import PrefixIndex
from .prompt import make_chunk


class CachedContents:
    """The contents of an index's blocks, for those who draw them. Only in the thread that owns the cache.

    A content is a block's tokens after all before them; its id is never used twice, and is above that of the content or
    root before it. So slices that are read at different moments fit together: what has gone meanwhile is only missing.
    """

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self._index = index
        self._block_size = block_size

    @property
    def num_blocks(self) -> int:
        """Count the ids of blocks, the null block's included. O(1)."""
        return len(self._index.chain_hash)

    def identities(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """What blocks `first` to `last` cache (0: nothing), and what is before that: int64 (n, 2), a copy. O(n)."""
        return view_i64(self._index.identity).reshape(-1, 2)[first:last].copy()

    def keys(self, most: int) -> dict[int, tuple[object, ...]]:
        """Return the extra keys of roots by id, of at most `most`, the latest used ones. O(most).

        Those of a request, or (the content or root before it, what stands in the block besides text).
        """
        return self._index.roots.latest(most)

    def tokens(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the tokens of blocks, int32 (n, block size), a copy; of one that caches nothing, any. O(tokens)."""
        size = self._block_size
        if len(blocks) == 0:
            return np.empty((0, size), dtype=np.int32)
        return self._index.rows.tokens(vec[i32](blocks), size, len(blocks) * size).reshape(len(blocks), size)

    def equal_to(self, token_ids: object, extra_keys: object = ()) -> list[int]:
        """All blocks that cache the last full block of a prompt after all before it, oldest first. O(tokens + found).

        One that is still to be computed is none of them.
        """
        prompt = make_chunk(token_ids, extra_keys, self._block_size).at(0, self._block_size)
        wanted = prompt.num_tokens // i64(self._block_size)
        index = self._index
        found = index.find_prompt(prompt, wanted)
        if wanted == 0 or len(found) < wanted:
            return []
        return [block for block in index.rings.members(i64(found[wanted - 1])) if index.owner[i64(block)] == 0]

    def still(self, blocks: npt.NDArray[np.int32], contents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which blocks cache these contents now, bool (n,). O(n)."""
        same: npt.NDArray[np.bool_] = view_i64(self._index.identity)[2 * blocks] == contents
        return same
