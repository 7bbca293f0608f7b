"""Read access to all cached contents, a slice at a time: parents, extra keys, and the tokens of some blocks."""

import numpy as np
import numpy.typing as npt
from librt.vecs import vec
from mypy_extensions import i32, i64

from ..arrays import view_i64
from .prefix_index import PrefixIndex
from .prompt import make_chunk


class CachedContents:
    """The contents of an index's blocks, for visualisation. Only for the thread that owns the cache.

    A content is a block's tokens after all tokens before it. Its id is never reused, and greater than that of its
    parent. So slices read at different times are consistent: removed contents are merely missing.
    """

    def __init__(self, index: PrefixIndex, block_size: int) -> None:
        self._index = index
        self._block_size = block_size

    @property
    def num_blocks(self) -> int:
        """Return the number of block ids, null block included. O(1)."""
        return len(self._index.chain_hash)

    def identities(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Return the contents of blocks `first` to `last` (0: none) and their parents: int64 (n, 2), a copy. O(n)."""
        return view_i64(self._index.identity).reshape(-1, 2)[first:last].copy()

    def keys(self, most: int) -> dict[int, tuple[object, ...]]:
        """Return the extra keys of the `most` most recently used roots, by root id. O(most).

        They are those of a request, or (parent content or root, spans of the block).
        """
        return self._index.roots.latest(most)

    def tokens(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Return the tokens of blocks, int32 (n, block size), a copy; undefined for blocks that are not cached.

        O(tokens).
        """
        size = self._block_size
        if len(blocks) == 0:
            return np.empty((0, size), dtype=np.int32)
        return self._index.rows.tokens(vec[i32](blocks), size, len(blocks) * size).reshape(len(blocks), size)

    def equal_to(self, token_ids: object, extra_keys: object = ()) -> list[int]:
        """Return all computed blocks that cache the last full block of a prompt, oldest first. O(tokens + found)."""
        prompt = make_chunk(token_ids, extra_keys, self._block_size).at(0, self._block_size)
        wanted = prompt.num_tokens // i64(self._block_size)
        index = self._index
        found = index.find_prompt(prompt, wanted)
        if wanted == 0 or len(found) < wanted:
            return []
        return [block for block in index.rings.members(i64(found[wanted - 1])) if index.owner[i64(block)] == 0]

    def still_cached(self, blocks: npt.NDArray[np.int32], contents: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each block whether it still caches this content, bool (n,). O(n)."""
        same: npt.NDArray[np.bool_] = view_i64(self._index.identity)[2 * blocks] == contents
        return same
