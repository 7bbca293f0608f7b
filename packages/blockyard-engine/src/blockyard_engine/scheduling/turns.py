"""Here is decided whose request starts next, and whose makes room, where tenants share the pool (docs/tenants.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from blockyard import KVCacheManager

from ..request import Branch
from .limits import CacheLimits


class Turns:
    """It says whose excess is greater: what tenants hold above their floor, by weight; groups first, then members.

    It says what stands in a `read` of the cache. Numbers of blocks but for `excess`; tenants are numbers of a `Roster`.
    """

    def __init__(self, cache: KVCacheManager, limits: CacheLimits) -> None:
        roster = limits.roster
        self._cache = cache
        self._limits = limits
        self._members = roster.members
        self._groups = roster.groups
        self._group = np.array([roster.groups.index(group) for group in roster.group_of])
        self._floors = np.array([member.min_blocks for member in roster.members])
        self.read()

    def read(self) -> None:
        """Take note of what each tenant holds. O(tenants)."""
        self._held = self._cache.num_held_by_tenant
        self._claims = np.maximum(self._floors - self._held, 0)
        self._group_held = np.bincount(self._group, self._held)
        self._group_claims = np.bincount(self._group, self._claims)

    def every_group(self) -> set[int]:
        """Return the numbers of all groups."""
        return set(range(len(self._groups)))

    def group_of(self, tenant: int) -> int:
        """Return the number of its group. O(1)."""
        return int(self._group[tenant])

    def excess(self, tenant: int) -> tuple[float, float]:
        """Return its group's, and its own in the group; who holds no more than a floor has 0 or less. O(1)."""
        place, member = self._group[tenant], self._members[tenant]
        group = self._groups[place]
        own = (self._held[tenant] - member.min_blocks) / member.weight
        return (self._group_held[place] - group.floor) / group.weight, own

    def lacks(self, tenant: int) -> int:
        """Return what it may take within its floor, or its group's. O(members)."""
        place = self._group[tenant]
        others = self._group_claims[place] - self._claims[tenant]
        return int(max(self._claims[tenant], self._groups[place].floor - self._group_held[place] - others))

    def lends(self, tenant: int, other: int) -> int:
        """Return what it may lose for another one: that leaves it its floor, and its group too. O(members)."""
        place, lent = self._group[tenant], self._held[tenant] - self._floors[tenant]
        if place != self._group[other]:
            lent = min(lent, self._group_held[place] - self._groups[place].floor)
        return int(lent)

    def concerned(self, tenant: int, needed: int) -> range:
        """Return the groups whose requests may be in its way when it wants `needed` blocks; none where it is at its own
        limit, its own where that is at one. O(1)."""
        place, member = int(self._group[tenant]), self._members[tenant]
        if member.max_held is not None and self._held[tenant] + needed > member.max_held:
            return range(0)
        most, others = self._groups[place].max_held, self._group_claims[place] - self._claims[tenant]
        is_full = most is not None and self._group_held[place] + others + needed > most
        return range(place, place + 1) if is_full else range(len(self._groups))

    def lenders(self, tenant: int, needed: int, running: Iterable[Branch]) -> list[int]:
        """Return who runs and may make room for `needed` blocks of a tenant, the furthest above its share first."""
        groups, own = self.concerned(tenant, needed), self.excess(tenant)
        found = {branch.request.tenant for branch in running}
        above = [(self.excess(each), each) for each in found if self._group[each] in groups]
        return [each for excess, each in sorted(above, reverse=True) if excess > own]

    def num_needed(self, branch: Branch) -> int:
        """Return the blocks that a waiting branch begins with, if it hits nothing. O(groups)."""
        num_seqs = 1 if branch.request.is_forked else branch.request.sampling.n
        return self._limits.num_at_admission(len(branch.token_ids), num_seqs)


class Line:
    """It gives waiting branches out, one after another as each may start.

    Without `turns` it is their order, to the first refused. With them the next is the first of the tenant with the
    least excess. Who is refused ends his tenant's turn. Others whose requests may be in his way pass him only within
    their floor, of which he could have had nothing. only_floors: whether no other request starts at all.
    """

    def __init__(self, waiting: list[Branch], turns: Turns | None, only_floors: bool = False) -> None:
        self._turns = turns
        self._queues: dict[int, deque[Branch]] = {}
        self._held_up: set[int] = turns.every_group() if turns and only_floors else set()
        for branch in waiting:
            self._queues.setdefault(branch.request.tenant if turns else 0, deque()).append(branch)

    def __iter__(self) -> Iterator[Branch]:
        """Yield the branches; between two of them `refuse` may be called. O(tenants that wait) each."""
        while (tenant := self._next()) is not None:
            queue = self._queues[tenant]
            branch = queue.popleft()
            if not queue:
                del self._queues[tenant]
            yield branch

    def _next(self) -> int | None:
        turns, queues = self._turns, self._queues
        if turns is None:
            return next(iter(queues), None)
        may = [
            each
            for each, queue in queues.items()
            if turns.group_of(each) not in self._held_up or turns.num_needed(queue[0]) <= turns.lacks(each)
        ]
        return min(may, key=lambda each: (turns.excess(each), queues[each][0].rank), default=None)

    def refuse(self, branch: Branch) -> None:
        """The branch cannot start now."""
        tenant = branch.request.tenant if self._turns else 0
        self._queues.pop(tenant, None)
        if self._turns is not None:
            self._held_up.update(self._turns.concerned(tenant, self._turns.num_needed(branch)))
