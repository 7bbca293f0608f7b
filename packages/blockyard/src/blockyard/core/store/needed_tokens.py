"""Token blocks under states are kept at the end of their queue: without them a state is not found."""

from mypy_extensions import i64

from ...ids import NULL_BLOCK
from ..blocks.ledger import BlockLedger
from ..policies.states.shelf import StateShelf
from ..policies.states.tree import ROOT


class NeededTokens:
    """Token blocks take no memory of their own, so they go by a plain queue, whatever the order of states keeps.

    shelf: what states need.
    """

    def __init__(self, token_blocks: BlockLedger, shelf: StateShelf) -> None:
        self.token_blocks = token_blocks
        self.shelf = shelf
        #: After how many token blocks taken they are to be moved again.
        self._refresh_at: i64 = 0

    def keep(self) -> None:
        """Move those that states need to the end of their queue, before they are forgotten. O(1) amortised."""
        ledger, shelf = self.token_blocks, self.shelf
        if ledger.num_allocated_blocks < self._refresh_at:
            return
        tree = shelf.book.tree
        num_moved: i64 = 0
        node = i64(len(tree.key)) - 1
        while node > ROOT:
            block = shelf.token_at(node)
            if tree.num_states[node] > 0 and block != NULL_BLOCK and self._is_idle(block, tree.key[node]):
                ledger.queue.remove(block)
                ledger.queue.append(block)
                num_moved += 1
            node -= 1
        self._refresh_at = ledger.num_allocated_blocks + max((ledger.queue.num_free - num_moved) // 2, 1)

    def _is_idle(self, block: i64, key: i64) -> bool:
        index = self.token_blocks.index
        return self.token_blocks.ref_cnt[block] == 0 and index.is_cached(block) and index.chain_hash[block] == key
