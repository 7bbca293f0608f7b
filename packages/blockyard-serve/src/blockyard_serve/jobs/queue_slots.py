"""Queue slots by tenant; half of them are reserved."""

from __future__ import annotations

from blockyard.tenants import Roster


class QueueSlots:
    """Counts queued and running completions by tenant.

    Half of the slots are reserved in proportion to the tenants' weights, so that no tenant can fill the queue for the
    others. The other half is first come, first served.

    Attributes:
        num_taken: slots in use.
    """

    def __init__(self, capacity: int, roster: Roster) -> None:
        self.capacity = capacity
        self.num_taken = 0
        self._names = roster.names
        self._taken = [0] * len(self._names)
        weights = sum(group.weight for group in roster.groups)
        members = [sum(each.weight for each in group.members) for group in roster.group_of]
        reserved, least = capacity // 2, int(len(self._names) <= capacity // 2)
        self._reserved = [
            max(reserved * group.weight * member.weight // (weights * total), least)
            for group, member, total in zip(roster.group_of, roster.members, members, strict=True)
        ]

    def refusal(self, num_completions: int, tenant: int) -> str | None:
        """Return why a tenant cannot have `num_completions` slots now; None if it can. O(tenants).

        With tenant -1, which means that it is not known yet, return None if any tenant could have them.
        """
        if self.num_taken + num_completions > self.capacity:
            return f"the queue is full: {self.num_taken} of {self.capacity} slots are taken; try again later"
        if tenant < 0 or len(self._names) == 1:
            return None
        lacking = [max(reserved - taken, 0) for reserved, taken in zip(self._reserved, self._taken, strict=True)]
        others = sum(lacking) - lacking[tenant]
        if self.num_taken + num_completions + others > self.capacity:
            return (
                f"tenant {self._names[tenant]!r} has {self._taken[tenant]} of {self.capacity} queue slots and needs "
                f"{num_completions} more; {others} are reserved for other tenants; try again later"
            )
        return None

    def take(self, num_completions: int, tenant: int) -> None:
        """Add slots to those of a tenant; a negative number releases them. O(1)."""
        self.num_taken += num_completions
        self._taken[tenant] += num_completions
