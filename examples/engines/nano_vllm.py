"""nano-vllm on a `BlockPool`: its scheduler, its engine and its block tables stay as they are.

    from engines import nano_vllm

    llm = LLM(path)
    nano_vllm.install(llm.scheduler)

Written for nano-vllm with chunked prefill (2026), whose block manager has the six methods below. What changes: a hit is
compared token by token up to the root (nano-vllm compares a block's own tokens, and its parents' by hash), blocks are
evicted by a policy of one's choice, and the pool can be watched and checked.
"""

from __future__ import annotations

from typing import Any, Protocol

from blockyard import BlockLease, BlockPool, FoundBlocks, InvalidArgument
from blockyard.signatures import require_methods

#: nano-vllm numbers its blocks from 0; block 0 of a pool is the null block, so that a pool has one more.
_FIRST = 1
#: What nano-vllm's block manager takes; its versions before chunked prefill have the same number and other arguments.
_CONTRACT = {
    "can_allocate": "self, seq",
    "allocate": "self, seq, num_cached_blocks",
    "deallocate": "self, seq",
    "can_append": "self, seq",
    "may_append": "self, seq",
    "hash_blocks": "self, seq",
}
_NEEDED = "nano-vllm with chunked prefill: pip install git+https://github.com/GeeeekExplorer/nano-vllm.git"


class Sequence(Protocol):
    """The part of nano-vllm's `Sequence` that is read here."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int
    num_scheduled_tokens: int

    def __len__(self) -> int:
        """Number of tokens."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks its tokens need."""


class BlockManager:
    """nano-vllm's block manager, with its arguments. pool_options, eviction_policy for example, go to `BlockPool`.

    `pool` is the pool; its block ids are those in the block tables + 1. Raises `InvalidArgument` for sizes outside the
    pool's limits.
    """

    def __init__(self, num_blocks: int, block_size: int, **pool_options: Any) -> None:
        if not isinstance(num_blocks, int) or num_blocks < 1:
            raise InvalidArgument(f"num_blocks is {num_blocks!r}; it must be an integer from 1")
        self.pool = BlockPool(num_blocks + _FIRST, block_size, **pool_options)
        self.block_size = self.pool.block_size
        self._leases: dict[int, BlockLease] = {}
        self._found: tuple[int, FoundBlocks] | None = None

    def can_allocate(self, seq: Sequence) -> int:
        """Return how many blocks of a waiting sequence, without its last, are cached; -1 if the rest does not fit."""
        found = self._find(seq)
        if self.pool.num_free_blocks < seq.num_blocks - len(found) + found.num_idle:
            return -1
        self._found = (seq.seq_id, found)
        return len(found)

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Give a sequence that many cached blocks, and new ones for the rest.

        Raises `OutOfBlocks` if too few are free, `InvalidArgument` for a sequence that already has blocks.
        """
        if seq.seq_id in self._leases:
            raise InvalidArgument(f"seq {seq.seq_id} has blocks already; deallocate it first")
        if not isinstance(num_cached_blocks, int) or not 0 <= num_cached_blocks <= seq.num_blocks:
            raise InvalidArgument(
                f"num_cached_blocks is {num_cached_blocks!r}; it must be an integer from 0 to {seq.num_blocks}"
            )
        asked, found = self._found or (-1, None)
        if found is None or asked != seq.seq_id or len(found) < num_cached_blocks:
            found = self._find(seq)
        self._found = None
        num_new = seq.num_blocks - num_cached_blocks
        lease = self.pool.hold(found, holder=f"seq {seq.seq_id}", num_blocks=num_cached_blocks, extend_by=num_new)
        self._leases[seq.seq_id] = lease
        seq.block_table.extend((lease.block_ids - _FIRST).tolist())
        seq.num_cached_tokens = num_cached_blocks * self.block_size

    def deallocate(self, seq: Sequence) -> None:
        """Free a sequence's blocks. Cached ones can still be found until they are evicted."""
        lease = self._leases.pop(seq.seq_id, None)
        if lease is not None:
            self.pool.free_blocks(lease)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Sequence) -> bool:
        """Return whether there is a block for a sequence's newest token, if it needs one."""
        return not self._needs_block(seq) or self.pool.num_free_blocks > 0

    def may_append(self, seq: Sequence) -> None:
        """Give a sequence a block for its newest token, if it needs one.

        Raises `OutOfBlocks` if there is none, `InvalidArgument` for a sequence without blocks.
        """
        if self._needs_block(seq):
            new = self.pool.extend(self._lease(seq), 1)
            seq.block_table.append(int(new[0]) - _FIRST)

    def hash_blocks(self, seq: Sequence) -> None:
        """Cache the blocks that the step filled. O(new tokens).

        Raises `InvalidArgument` for a sequence without blocks.
        """
        start = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        if end > start:
            tokens = seq.token_ids[start * self.block_size : end * self.block_size]
            self.pool.cache_next_blocks(self._lease(seq), tokens, start)

    def _find(self, seq: Sequence) -> FoundBlocks:
        found = self.pool.find_cached_blocks(seq.token_ids)
        return found.first(min(len(found), seq.num_blocks - 1))

    def _lease(self, seq: Sequence) -> BlockLease:
        lease = self._leases.get(seq.seq_id)
        if lease is None:
            raise InvalidArgument(f"seq {seq.seq_id} has no blocks; it was not allocated, or it has ended")
        return lease

    def _needs_block(self, seq: Sequence) -> bool:
        return len(seq) % self.block_size == 1 or self.block_size == 1


def install(scheduler: Any, **pool_options: Any) -> BlockManager:
    """Replace the block manager of a nano-vllm scheduler, before it has run anything.

    Raises `InvalidArgument` if sequences hold blocks of the old manager or the argument is not such a scheduler, and
    `MissingExtra` for a version of nano-vllm without chunked prefill.
    """
    if not (hasattr(scheduler, "block_manager") and hasattr(scheduler, "waiting")):
        raise InvalidArgument(f"scheduler is a {type(scheduler).__name__}; it must be nano-vllm's, llm.scheduler")
    require_methods(scheduler.block_manager, _CONTRACT, __name__, _NEEDED)
    held = [seq for seq in (*scheduler.waiting, *scheduler.running) if seq.block_table]
    if held:
        raise InvalidArgument(f"scheduler has {len(held)} sequences with blocks; install it before the first step")
    old = scheduler.block_manager
    manager = BlockManager(len(old.blocks), old.block_size, **pool_options)
    scheduler.block_manager = manager
    return manager


if __name__ == "__main__":
    raise SystemExit(f"{__file__} is imported, not run: its first lines show how. It needs {_NEEDED}")
