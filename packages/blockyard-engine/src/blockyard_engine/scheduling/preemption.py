"""Preemption: which sequence makes room for another, and where its keys and values go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard import KVCacheManager
from blockyard.errors import OutOfBlocks

from ..engine_options import Preemption
from ..moves import MoveQueue
from ..request import Branch
from .admission_control import AdmissionControl
from .fair_shares import FairShares

if TYPE_CHECKING:
    from blockyard_tiers import Offload


class Preemptor:
    """Chooses, preempts and restores sequences."""

    def __init__(self, cache: KVCacheManager, way: Preemption, moves: MoveQueue) -> None:
        self._cache = cache
        self.offload: Offload | None = None
        self.admission: AdmissionControl | None = None
        self._way = way
        self._moves = moves

    def choose_lender(self, running: list[Branch], needy: Branch, shares: FairShares, needed: int) -> Branch | None:
        """Return another tenant's branch that makes room for `needy`, or None. O(blocks).

        The branch belongs to the tenant with the largest overuse, which must exceed that of `needy`'s tenant. Without
        the branch, its tenant still has its guarantee. `needed` is the number of blocks; 0 if only a row is needed.
        """
        tenant = needy.request.tenant
        shares.read()
        for lender in shares.lenders(tenant, needed, running):
            branches = [branch for branch in running if branch.request.tenant == lender]
            owned = self._cache.num_owned_blocks([branch.seq for branch in branches]).tolist()
            lent = shares.num_lendable(lender, tenant)
            min_blocks = 1 if needed else 0
            candidates = [branch for branch, own in zip(branches, owned, strict=True) if min_blocks <= own <= lent]
            if candidates:
                return self._cheapest(candidates)
        return None

    def choose_victim(self, running: list[Branch], needy: Branch) -> Branch:
        """Return the branch that makes room for `needy`: one of its tenant that is served later, or itself. O(blocks).

        Branches that are served earlier are never preempted, so the first always finishes.
        """
        later = [b for b in running if b.order_key > needy.order_key and b.request.tenant == needy.request.tenant]
        return self._cheapest(later) if later else needy

    def _cheapest(self, later: list[Branch]) -> Branch:
        """Return the cheapest branch to preempt.

        It has the lowest priority; then frees blocks (a fork may own none); then loses the fewest computed tokens per
        freed block; then is the youngest.
        """
        owned = self._cache.num_owned_blocks([branch.seq for branch in later]).tolist()
        computed = [self._cache.num_computed_tokens(branch.seq) for branch in later]
        costs = [
            (branch.request.priority, own > 0, -num_computed / max(own, 1), branch.order_key)
            for branch, own, num_computed in zip(later, owned, computed, strict=True)
        ]
        return later[costs.index(max(costs))]

    def preempt(self, branch: Branch) -> None:
        """Take the blocks of a running branch; it keeps its tokens. O(blocks)."""
        if self._way is Preemption.SWAP and self._cache.num_computed_tokens(branch.seq) > 0:
            try:
                self._cache.commit([branch.seq], 0)  # its reservation ends
                self._moves.note(self._cache.swap_out([branch.seq]))
                branch.is_swapped = True
                if self.admission is not None:
                    self.admission.finish(branch, keeps_blocks=False)
                return
            except OutOfBlocks:
                pass
        self.release(branch)

    def release(self, branch: Branch) -> None:
        """Free a branch's blocks and row, and cancel its loads from tiers. O(blocks)."""
        if self.offload is not None:
            self.offload.forget(branch)
        if self.admission is not None:
            self.admission.finish(branch)
        if branch.seq >= 0:
            self._cache.free(branch.seq)
        branch.seq, branch.is_swapped = -1, False

    def swap_in(self, branch: Branch, is_alone: bool) -> bool:
        """Swap a branch in if it fits with room for its next token, or in any case if none is running."""
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
