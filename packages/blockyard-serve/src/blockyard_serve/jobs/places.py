"""Half of the places in the queue are kept for tenants that have few."""

from __future__ import annotations

from blockyard.tenants import Roster


class Places:
    """It counts completions that wait and run, `capacity` at most, by tenant.

    Half of the places are kept, in proportion to weights: each tenant's part is there for it however many the others
    ask for. The other half is whose it is who comes first. num_taken: in all.
    """

    def __init__(self, capacity: int, roster: Roster) -> None:
        self.capacity = capacity
        self.num_taken = 0
        self._names = roster.names
        self._taken = [0] * len(self._names)
        weights = sum(group.weight for group in roster.groups)
        members = [sum(each.weight for each in group.members) for group in roster.group_of]
        kept, least = capacity // 2, int(len(self._names) <= capacity // 2)
        self._kept = [
            max(kept * group.weight * member.weight // (weights * total), least)
            for group, member, total in zip(roster.group_of, roster.members, members, strict=True)
        ]

    def refusal(self, num_completions: int, tenant: int) -> str | None:
        """Say why a tenant cannot have these places now; None if it can, or is -1 and some tenant may. O(tenants)."""
        if self.num_taken + num_completions > self.capacity:
            return "the server has as many requests as it can queue; try again later"
        if tenant < 0 or len(self._names) == 1:
            return None
        lacking = [max(kept - taken, 0) for kept, taken in zip(self._kept, self._taken, strict=True)]
        others = sum(lacking) - lacking[tenant]
        if self.num_taken + num_completions + others > self.capacity:
            return (
                f"tenant {self._names[tenant]!r} has {self._taken[tenant]} of {self.capacity} completions that the "
                f"server can queue and asks for {num_completions}; {others} are kept for other tenants; try again later"
            )
        return None

    def take(self, num_completions: int, tenant: int) -> None:
        """Note the places that a tenant has from now on, or below 0 has no longer. O(1)."""
        self.num_taken += num_completions
        self._taken[tenant] += num_completions
