"""Snapshots of single blocks, and the state of all blocks as an array."""

from typing import Final

import numpy as np
import numpy.typing as npt

from ...answers import BlockState
from ..arrays import view_i32, view_i64
from .ledger import BlockLedger


class KVCacheBlock:
    """A snapshot of one block. Later changes of the pool do not show in it.

    Attributes:
        block_id: position of the block in the KV tensors.
        ref_cnt: references of sequences and leases to the block.
        token_ids: tokens whose keys and values the block caches. Empty if it is not cached, if the pool does not store
            tokens, or if a span begins in a block of several token blocks.
        num_tokens: known tokens in the block, also if it is partly filled; 0 if unknown (a bare lease).
        group: the layer group whose keys and values the block holds; None if it holds none.
        block_hash: the index's internal hash of its tokens and all tokens before them; None if not cached.
        is_computed: False while the block is indexed but a sequence still has to compute it.
        holders: names of the sequences and leases that hold it.
        is_null: True for block 0.
    """

    def __init__(
        self,
        block_id: int,
        ref_cnt: int,
        token_ids: list[int],
        block_hash: int | None,
        is_computed: bool,
        holders: list[str],
        num_tokens: int = 0,
        group: int | None = None,
    ) -> None:
        self.block_id = block_id
        self.ref_cnt = ref_cnt
        self.token_ids = token_ids
        self.block_hash = block_hash
        self.is_computed = is_computed
        self.holders = holders
        self.num_tokens = num_tokens
        self.group = group

    @property
    def is_null(self) -> bool:
        """Return whether this is block 0, the placeholder that is never allocated, cached or freed."""
        return self.block_id == 0

    @property
    def is_free(self) -> bool:
        """Return whether nothing holds the block, so that the next allocations may take it."""
        return self.ref_cnt == 0 and not self.is_null

    @property
    def is_cached(self) -> bool:
        """Return whether a prompt can hit the block."""
        return self.block_hash is not None

    def __reduce__(self) -> tuple[object, ...]:
        known = (self.block_id, self.ref_cnt, self.token_ids, self.block_hash, self.is_computed, self.holders)
        return (KVCacheBlock, (*known, self.num_tokens, self.group))

    def __repr__(self) -> str:
        state = "null" if self.is_null else "free" if self.is_free else f"ref_cnt={self.ref_cnt}"
        cached = f" cached={self.token_ids}" if self.is_cached else ""
        held = f" holders={self.holders}" if self.holders else ""
        return f"<KVCacheBlock {self.block_id} {state}{cached}{held}>"


_BY_HELD_AND_CACHED: Final = np.array(
    [BlockState.FREE, BlockState.IDLE, BlockState.PRIVATE, BlockState.SHARED], np.uint8
)


def block_states(ledger: BlockLedger) -> npt.NDArray[np.uint8]:
    """Return the `BlockState` of every id, uint8 (capacity,). O(capacity)."""
    counts = view_i32(ledger.ref_cnt)
    held = counts > 0
    cached = view_i64(ledger.index.identity)[: 2 * len(counts) : 2] != 0
    states: npt.NDArray[np.uint8] = _BY_HELD_AND_CACHED[2 * held.view(np.uint8) + cached.view(np.uint8)]
    if ledger.index.num_pending > 0:
        states[view_i32(ledger.index.owner)[: len(counts)] > 0] = BlockState.PENDING
    fence = ledger.fence
    for block in fence.block_ids():
        if counts[block] == 1 and states[block] == BlockState.PRIVATE:
            states[block] = BlockState.FENCED
    end = ledger.num_blocks
    states[end:] = np.where(held[end:], BlockState.RETIRING, BlockState.GONE)
    states[0] = BlockState.GONE
    return states
