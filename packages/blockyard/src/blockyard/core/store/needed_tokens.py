"""Keeps the token blocks under checkpoints cached: without them no prompt finds the checkpoint."""

from mypy_extensions import i64

from ...ids import NULL_BLOCK
from ..blocks.ledger import BlockLedger
from ..policies.states.prefix_tree import ROOT
from ..policies.states.registry import CheckpointRegistry


class NeededTokens:
    """Token blocks are evicted in LRU order, whatever the order of states keeps; this moves needed ones to the end."""

    def __init__(self, token_blocks: BlockLedger, registry: CheckpointRegistry) -> None:
        self.token_blocks = token_blocks
        self.registry = registry
        #: The number of token blocks taken at which they are moved again.
        self._refresh_at: i64 = 0

    def keep(self) -> None:
        """Move the token blocks that checkpoints need, before they can be evicted. O(1) amortised."""
        ledger = self.token_blocks
        if ledger.num_allocated_blocks < self._refresh_at:
            return
        tree = self.registry.tree
        num_moved: i64 = 0
        node = i64(len(tree.key)) - 1
        while node > ROOT:
            block = self.registry.block_map.token_block_at(node)
            is_idle = tree.num_checkpoints[node] > 0 and block != NULL_BLOCK and ledger.ref_cnt[block] == 0
            if is_idle and ledger.index.is_cached(block) and ledger.index.chain_hash[block] == tree.key[node]:
                ledger.queue.remove(block)
                ledger.queue.append(block)
                num_moved += 1
            node -= 1
        self._refresh_at = ledger.num_allocated_blocks + max((ledger.queue.num_free - num_moved) // 2, 1)
