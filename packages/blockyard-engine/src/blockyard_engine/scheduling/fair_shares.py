"""Weighted fair sharing of the pool between tenants (docs/tenants.md): who starts next and who makes room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from blockyard import KVCacheManager

from ..request import Branch
from .limits import CacheLimits


class FairShares:
    """Overuse and shortfall of the tenants, as of the last `read` of the cache.

    Overuse is the number of blocks held above the guarantee, divided by the weight; groups are compared first, then
    their members. Tenants are numbered as in the `Roster`.
    """

    def __init__(self, cache: KVCacheManager, limits: CacheLimits) -> None:
        roster = limits.roster
        self._cache = cache
        self._limits = limits
        self._members = roster.members
        self._groups = roster.groups
        self.num_groups = len(roster.groups)
        self._group = np.array([roster.groups.index(group) for group in roster.group_of])
        self._guarantees = np.array([member.min_blocks for member in roster.members])
        self.read()

    def read(self) -> None:
        """Read from the cache what each tenant holds. O(tenants)."""
        self._held = self._cache.num_held_by_tenant
        self._shortfalls = np.maximum(self._guarantees - self._held, 0)
        self._group_held = np.bincount(self._group, self._held)
        self._group_shortfalls = np.bincount(self._group, self._shortfalls)

    def group_of(self, tenant: int) -> int:
        """Return the number of a tenant's group. O(1)."""
        return int(self._group[tenant])

    def overuse(self, tenant: int) -> tuple[float, float]:
        """Return the overuse of a tenant's group and of the tenant in it; 0 or less within the guarantees. O(1)."""
        group_id, member = self._group[tenant], self._members[tenant]
        group = self._groups[group_id]
        own = (self._held[tenant] - member.min_blocks) / member.weight
        return (self._group_held[group_id] - group.guarantee) / group.weight, own

    def shortfall(self, tenant: int) -> int:
        """Return how many blocks a tenant may still take within its guarantee or its group's."""
        group_id = self._group[tenant]
        others = self._group_shortfalls[group_id] - self._shortfalls[tenant]
        return int(
            max(self._shortfalls[tenant], self._groups[group_id].guarantee - self._group_held[group_id] - others)
        )

    def num_lendable(self, tenant: int, other: int) -> int:
        """Return how many blocks a tenant can give to another one within both guarantees. O(members).

        The guarantees are its own and its group's; the group's does not count if the other tenant is in it.
        """
        group_id, lent = self._group[tenant], self._held[tenant] - self._guarantees[tenant]
        if group_id != self._group[other]:
            lent = min(lent, self._group_held[group_id] - self._groups[group_id].guarantee)
        return int(lent)

    def contending_groups(self, tenant: int, needed: int) -> range:
        """Return the groups that could make room for `needed` blocks of a tenant. O(1).

        The result is empty if the tenant would exceed its limit, and only its own group if that would exceed its limit.
        """
        group_id, member = int(self._group[tenant]), self._members[tenant]
        if member.max_held is not None and self._held[tenant] + needed > member.max_held:
            return range(0)
        most, others = self._groups[group_id].max_held, self._group_shortfalls[group_id] - self._shortfalls[tenant]
        is_full = most is not None and self._group_held[group_id] + others + needed > most
        return range(group_id, group_id + 1) if is_full else range(len(self._groups))

    def lenders(self, tenant: int, needed: int, running: Iterable[Branch]) -> list[int]:
        """Return running tenants that may make room for `needed` blocks of a tenant, largest overuse first."""
        groups, own = self.contending_groups(tenant, needed), self.overuse(tenant)
        found = {branch.request.tenant for branch in running}
        above = [(self.overuse(each), each) for each in found if self._group[each] in groups]
        return [each for overuse, each in sorted(above, reverse=True) if overuse > own]

    def num_needed(self, branch: Branch) -> int:
        """Return the blocks that a waiting branch needs at first if it hits nothing. O(groups)."""
        num_seqs = 1 if branch.request.is_forked else branch.request.sampling.n
        return self._limits.num_admission_blocks(len(branch.token_ids), num_seqs)


class AdmissionQueue:
    """Yields waiting branches in the order of their admission.

    Without `shares`, branches keep their order, and the first refusal ends it. With `shares`, the next branch is the
    first one of the tenant with the least overuse. After a refusal the tenant gets no further branch, and contending
    groups may overtake it only within their guarantees, whose blocks it could not have used. With `only_guaranteed`,
    only branches within their guarantees may start.
    """

    def __init__(self, waiting: list[Branch], shares: FairShares | None, only_guaranteed: bool = False) -> None:
        self._shares = shares
        self._queues: dict[int, deque[Branch]] = {}
        #: Groups whose branches may start only within their guarantees.
        self._held_up: set[int] = set(range(shares.num_groups)) if shares and only_guaranteed else set()
        for branch in waiting:
            self._queues.setdefault(branch.request.tenant if shares else 0, deque()).append(branch)

    def __iter__(self) -> Iterator[Branch]:
        """Yield the branches; `refuse` may be called between two of them. O(waiting tenants) each."""
        while (tenant := self._next()) is not None:
            queue = self._queues[tenant]
            branch = queue.popleft()
            if not queue:
                del self._queues[tenant]
            yield branch

    def _next(self) -> int | None:
        shares, queues = self._shares, self._queues
        if shares is None:
            return next(iter(queues), None)
        candidates = [
            each
            for each, queue in queues.items()
            if shares.group_of(each) not in self._held_up or shares.num_needed(queue[0]) <= shares.shortfall(each)
        ]
        return min(candidates, key=lambda each: (shares.overuse(each), queues[each][0].order_key), default=None)

    def refuse(self, branch: Branch) -> None:
        """Record that a branch cannot start now."""
        tenant = branch.request.tenant if self._shares else 0
        self._queues.pop(tenant, None)
        if self._shares is not None:
            self._held_up.update(self._shares.contending_groups(tenant, self._shares.num_needed(branch)))
