"""Room for those who go first: which branch to preempt, and where its keys and values go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard import KVCacheManager
from blockyard.errors import OutOfBlocks

from ..moves import MoveQueue
from ..options import Preemption
from ..request import Branch
from .turns import Turns

if TYPE_CHECKING:
    from blockyard_tiers import Offload


class Preemptor:
    """Sets running branches back, and brings swapped ones in again."""

    def __init__(self, cache: KVCacheManager, way: Preemption, moves: MoveQueue) -> None:
        self._cache = cache
        #: What is told of branches that give their blocks back; None without tiers.
        self.offload: Offload | None = None
        self._way = way
        self._moves = moves

    def choose_lender(self, running: list[Branch], needy: Branch, turns: Turns, needed: int) -> Branch | None:
        """Return which branch of another tenant makes room for `needed` blocks of `needy`, or with 0 for its row; None
        for none. O(blocks).

        It is one of the tenant furthest above its share, as far as that is further above than `needy`'s own, and keeps
        its floor without it.
        """
        tenant = needy.request.tenant
        turns.read()
        for lender in turns.lenders(tenant, needed, running):
            branches = [branch for branch in running if branch.request.tenant == lender]
            owned = self._cache.num_owned_blocks([branch.seq for branch in branches]).tolist()
            lent = turns.lends(lender, tenant)
            least = 1 if needed else 0
            may = [branch for branch, own in zip(branches, owned, strict=True) if least <= own <= lent]
            if may:
                return self._cheapest(may)
        return None

    def choose_victim(self, running: list[Branch], needy: Branch) -> Branch:
        """Return which branch makes room for `needy`: one that goes after it, or itself where none does. O(blocks).

        Never one that goes before, or of another tenant: so the first is never preempted, ends, and another is first.
        """
        later = [b for b in running if b.rank > needy.rank and b.request.tenant == needy.request.tenant]
        return self._cheapest(later) if later else needy

    def _cheapest(self, later: list[Branch]) -> Branch:
        """Return one of the least urgent, one whose end frees blocks (a fork may own none alone), one that loses least:
        the fewest computed tokens for a block freed; the youngest of equals."""
        owned = self._cache.num_owned_blocks([branch.seq for branch in later]).tolist()
        computed = [self._cache.num_computed_tokens(branch.seq) for branch in later]
        costs = [
            (branch.request.priority, own > 0, -num_computed / max(own, 1), branch.rank)
            for branch, own, num_computed in zip(later, owned, computed, strict=True)
        ]
        return later[costs.index(max(costs))]

    def put_aside(self, branch: Branch) -> None:
        """Take a running branch's blocks away; its tokens stay. O(blocks)."""
        if self._way is Preemption.SWAP and self._cache.num_computed_tokens(branch.seq) > 0:
            try:
                self._cache.commit([branch.seq], 0)  # its reservation ends
                self._moves.note(self._cache.swap_out([branch.seq]))
                branch.is_swapped = True
                return
            except OutOfBlocks:
                pass
        self.forget(branch)

    def forget(self, branch: Branch) -> None:
        """Give a branch's blocks and its row back, wherever they are, and what tiers bring for it. O(blocks)."""
        if self.offload is not None:
            self.offload.forget(branch)
        if branch.seq >= 0:
            self._cache.free(branch.seq)
        branch.seq, branch.is_swapped = -1, False

    def bring_back(self, branch: Branch, is_alone: bool) -> bool:
        """Swap a branch in if it fits with room for its next token; if it is alone, in any case. O(blocks)."""
        config = self._cache.config
        num_tokens = len(branch.token_ids)
        needed = sum(group.num_blocks(num_tokens + 1, num_tokens) for group in config.layer_groups)
        if not is_alone and needed > self._cache.num_free_blocks - config.watermark_blocks:
            return False
        try:
            self._moves.note(self._cache.swap_in([branch.seq]))
        except OutOfBlocks:
            return False
        branch.is_swapped = False
        return True
