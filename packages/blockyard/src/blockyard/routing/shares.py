"""This tells a router where a tenant would have to wait, where tenants share the pools (docs/tenants.md)."""

from __future__ import annotations

from typing import Protocol

from ..keys import ExtraKey, plain_keys
from ..tenants import Roster, shares_of

#: Longer than any wait that `Shares.wait` tells.
LONGEST = 3


class PoolLimits(Protocol):
    """Says what an empty pool can carry: `CacheLimits` of an engine."""

    roster: Roster

    def num_usable(self, tenant: int) -> int:
        """Return the blocks that a tenant can ever hold."""

    def num_blocks(self, num_tokens: int, chunk: int | None = None) -> int:
        """Return the blocks of one sequence of `num_tokens` tokens."""


class Shares:
    """It knows what each tenant may hold of a replica, whose pools are alike, in blocks. num_usable: all of a pool's.

    Tenants are numbers of the roster.
    """

    def __init__(self, limits: PoolLimits, num_usable: int) -> None:
        self.roster = limits.roster
        self._limits = limits
        self._num_usable = num_usable
        self._most = [limits.num_usable(tenant) for tenant in range(len(self.roster.names))]
        self._floors = [member.min_blocks for member in self.roster.members]
        self._shares = shares_of(self.roster.groups, num_usable)

    def tenant_of(self, keys: tuple[ExtraKey, ...]) -> int:
        """Return whose a prompt with these extra keys is. O(keys)."""
        return self.roster.number_of(plain_keys(keys))

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that a request of `num_tokens` tokens, answer included, holds at its fullest. O(groups)."""
        return self._limits.num_blocks(num_tokens, 1) if num_tokens > 0 else 0

    def wait(self, tenant: int, needed: int, own: int, held: int) -> int:
        """Say how a tenant would get `needed` blocks where it holds `own` and all `held`: 0 at once, 1 later, 2 last.

        At once within its floor, and where the pool is not full; later within its share; beyond that, and beyond its
        limit, it is the first to make room. O(1).
        """
        wanted = own + needed
        if wanted > self._most[tenant]:
            return 2
        if wanted <= self._floors[tenant] or held + needed <= self._num_usable:
            return 0
        return 1 if wanted <= self._shares[tenant] else 2
