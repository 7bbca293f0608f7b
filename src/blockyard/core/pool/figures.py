"""What a pool says of itself in one number or array: questions that may be asked at any time."""

import numpy as np
import numpy.typing as npt

from ..arrays import view_i32, view_i64
from .ledger import BlockLedger
from .states import block_states


class PoolFigures:
    """The part of `BlockPool` that only looks."""

    def __init__(self, ledger: BlockLedger) -> None:
        self._ledger = ledger
        self._manager = ""

    # What is there. One number each: these may be asked at any time, also while a call runs.

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return self._ledger.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._ledger.block_size

    @property
    def enable_prefix_caching(self) -> bool:
        """Whether full blocks are indexed and hit."""
        return self._ledger.enable_prefix_caching

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block; while a pool shrinks, those that are still to go included."""
        return self._ledger.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, cached ones included. O(1)."""
        return self._ledger.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that leases or sequences hold. O(1)."""
        return self._ledger.num_used_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the index, held or not. O(1)."""
        return self._ledger.num_cached_blocks

    @property
    def num_retiring_blocks(self) -> int:
        """Blocks still held that a shrunken pool will not give out again. O(1)."""
        return self._ledger.num_retiring_blocks

    @property
    def num_evicted_blocks(self) -> int:
        """Cached blocks that an allocation took, or a shrinking pool gave up, so far. O(1)."""
        return int(self._ledger.num_evicted_blocks)

    @property
    def num_allocated_blocks(self) -> int:
        """Blocks that left the free queue so far, new or revived by a hit. O(1)."""
        return int(self._ledger.num_allocated_blocks)

    @property
    def num_freed_blocks(self) -> int:
        """Blocks that came back to it; the rest of the allocated ones is in use. O(1)."""
        return int(self._ledger.num_freed_blocks)

    @property
    def peak_used_blocks(self) -> int:
        """Most blocks held at once so far. O(1)."""
        return int(self._ledger.peak_used_blocks)

    @property
    def version(self) -> int:
        """A number that grows whenever what prompts can find changes, for copies of it elsewhere. O(1)."""
        return int(self._ledger.index.version)

    @property
    def usage(self) -> float:
        """Share of the usable blocks in use, 0 to 1; 0 of a pool that has none. O(1)."""
        return self._ledger.usage

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """How often each block is held, int32 (num_blocks,), read-only, live until the pool grows.

        Longer than num_blocks after the pool has shrunk: blocks may still be held there.
        """
        return view_i32(self._ledger.ref_cnt)

    def cached_mask(self) -> npt.NDArray[np.bool_]:
        """Which blocks are in the index, bool, as long as `ref_counts`, a copy."""
        cached: npt.NDArray[np.bool_] = view_i64(self._ledger.index.identity)[::2] != 0
        return cached

    def states(self) -> npt.NDArray[np.uint8]:
        """The `BlockState` of each block, uint8, as long as `ref_counts`, a copy. O(num_blocks)."""
        return block_states(self._ledger)

    @property
    def is_managed(self) -> bool:
        """Whether it is the pool of a `KVCacheManager`, whose sequences hold blocks besides leases."""
        return self._manager != ""
