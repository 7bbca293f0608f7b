"""How long a tenant would have to wait at a replica, if tenants share its pool (docs/tenants.md)."""

from __future__ import annotations

from typing import Protocol

from ..keys import ExtraKey, plain_keys
from ..tenants import Roster, shares_of

#: Longer than any result of `Shares.wait`.
LONGEST = 3


class PoolLimits(Protocol):
    """Limits of an empty pool, such as an engine's `CacheLimits`."""

    roster: Roster

    def num_usable(self, tenant: int) -> int:
        """Return the most blocks that a tenant can ever hold."""

    def num_blocks(self, num_tokens: int, chunk: int | None = None) -> int:
        """Return the blocks of one sequence of `num_tokens` tokens."""


class Shares:
    """Tenants' guarantees, shares and limits in the pool of each replica, in blocks. All pools are equal.

    Tenants are numbers of the roster.

    Args:
        limits: limits of an empty pool.
        num_usable: usable blocks of a pool.
    """

    def __init__(self, limits: PoolLimits, num_usable: int) -> None:
        self.roster = limits.roster
        self._limits = limits
        self._num_usable = num_usable
        self._most = [limits.num_usable(tenant) for tenant in range(len(self.roster.names))]
        self._guarantees = [member.min_blocks for member in self.roster.members]
        self._shares = shares_of(self.roster.groups, num_usable)

    def tenant_of(self, keys: tuple[ExtraKey, ...]) -> int:
        """Return the tenant of a prompt with these extra keys. O(keys)."""
        return self.roster.number_of(plain_keys(keys))

    def num_blocks(self, num_tokens: int) -> int:
        """Return the most blocks of a request of `num_tokens` tokens, answer included. O(groups)."""
        return self._limits.num_blocks(num_tokens, 1) if num_tokens > 0 else 0

    def wait(self, tenant: int, needed: int, own: int, held: int) -> int:
        """Return how a tenant would get `needed` blocks: 0 at once, 1 later, 2 last. O(1).

        At once within its guarantee, or while the pool is not full. Later within its share. Beyond its share or its
        limit, it is the first to be preempted.

        Args:
            tenant: number of the tenant.
            needed: blocks that the request needs.
            own: blocks that the tenant holds.
            held: blocks that all tenants hold.
        """
        wanted = own + needed
        if wanted > self._most[tenant]:
            return 2
        if wanted <= self._guarantees[tenant] or held + needed <= self._num_usable:
            return 0
        return 1 if wanted <= self._shares[tenant] else 2
