"""Tenants of a shared pool: their guarantees, limits and weights.

`CacheConfig(tenants=...)` takes them; docs/tenants.md explains each number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import require_int, require_str, require_unicode, shown
from .errors import InvalidArgument
from .keys import CacheSalt, ExtraKey, LoRA, plain_keys

MAX_TENANTS = 10_000
MAX_WEIGHT = 10_000
MAX_SHARE = 2**27
#: The tenant of prompts with no other tenant's keys, and of leases without a prompt.
OTHERS = "*"
#: Separates a tenant's salt from that of its client in one salt, so that tenants share no blocks.
SEPARATOR = "\x1f"


def _check_share(share: Tenant | TenantGroup) -> None:
    """Check the fields that tenants and groups have in common, and store numbers as plain ints for compiled code."""
    name = share.name
    require_unicode("name", require_str("name", name))
    if not 1 <= len(name) <= 200:
        raise InvalidArgument(f"name has {len(name)} characters; it must have 1 to 200")
    _store_int(share, "weight", 1, MAX_WEIGHT)
    _store_int(share, "min_blocks", 0, MAX_SHARE)
    _store_int(share, "max_held", share.min_blocks, MAX_SHARE)


def _store_int(share: Tenant | TenantGroup, field: str, low: int, high: int) -> None:
    """Check a number and store it as a plain int. None is allowed if it is the default."""
    value = getattr(share, field)
    if value is not None or field in ("weight", "min_blocks"):
        object.__setattr__(share, field, require_int(f"{field} of {share.name!r}", value, low, high))


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of a shared pool: the requests with certain extra keys, with their guarantee and limits in blocks.

    Args:
        name: for errors and metrics, 1 to 200 characters; "*" is the tenant of all other requests.
        weight: blocks beyond the guarantees are divided in proportion to it, 1 to 10,000.
        min_blocks: the guarantee: the tenant can always hold these blocks, and others cannot evict them.
        max_held: most blocks that its sequences and leases hold at a time; None for no limit.
        max_idle: idle blocks beyond this number are evicted before all others; None for no limit.
        max_retained: most blocks that `retain` may retain for it; None for no limit.
        keys: its extra keys, `CacheSalt` or `LoRA` (of any path); () stands for `CacheSalt(name)`. For a prompt with a
            salt and an adapter, the salt decides if it belongs to a tenant.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    name: str
    weight: int = 1
    min_blocks: int = 0
    max_held: int | None = None
    max_idle: int | None = None
    max_retained: int | None = None
    keys: tuple[CacheSalt | LoRA, ...] = ()

    def __post_init__(self) -> None:
        _check_share(self)
        for field in ("max_idle", "max_retained"):
            _store_int(self, field, 0, MAX_SHARE)
        if not isinstance(self.keys, tuple) or not all(type(key) in (CacheSalt, LoRA) for key in self.keys):
            raise InvalidArgument(f"keys of {self.name!r} is {shown(self.keys)}; it must be a tuple of CacheSalt, LoRA")
        if any(SEPARATOR in value for kind, value in self.marks if kind == "salt"):
            raise InvalidArgument(
                f"a salt of {self.name!r} contains U+001F, the separator of a client's salt: remove it"
            )
        if self.name == OTHERS and self.keys:
            raise InvalidArgument(f"keys of '*' is {shown(self.keys)}; it must be (): '*' has all other keys")

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """Return the keys that identify its prompts: ("salt", value) or ("lora", name)."""
        if self.name == OTHERS:
            return ()
        keys = self.keys or (CacheSalt(self.name),)
        return tuple(("salt", key.value) if isinstance(key, CacheSalt) else ("lora", key.name) for key in keys)


@dataclass(frozen=True, slots=True)
class TenantGroup:
    """Tenants that share a guarantee, a limit and a weight.

    Args:
        name: for errors and metrics, 1 to 200 characters.
        members: at least one tenant.
        weight: blocks beyond the guarantees are divided in proportion to it, 1 to 10,000.
        min_blocks: the guarantee of the group; the sum of its members' guarantees if that is more.
        max_held: most blocks that the members hold together, at least their guarantees; None for no limit.

    Raises:
        InvalidArgument: a value is outside its limits.
    """

    name: str
    members: tuple[Tenant, ...]
    weight: int = 1
    min_blocks: int = 0
    max_held: int | None = None

    def __post_init__(self) -> None:
        _check_share(self)
        if not isinstance(self.members, tuple) or not self.members:
            raise InvalidArgument(f"members of {self.name!r} is {shown(self.members)}; it must be a tuple of Tenant")
        for member in self.members:
            if type(member) is not Tenant:
                raise InvalidArgument(f"members of {self.name!r} holds {shown(member)}; its items must be Tenant")
        if self.max_held is not None and self.guarantee > self.max_held:
            raise InvalidArgument(
                f"max_held of {self.name!r} is {self.max_held}; the guarantees of its members are "
                f"{self.guarantee} blocks"
            )

    @property
    def guarantee(self) -> int:
        """Return the blocks guaranteed to the members together."""
        return max(self.min_blocks, sum(member.min_blocks for member in self.members))


def tenant_groups(tenants: object) -> tuple[TenantGroup, ...]:
    """Return tenants as groups, "*" first. A tenant outside of groups forms a group. O(tenants).

    Raises `InvalidArgument` unless `tenants` is a tuple of `Tenant` and `TenantGroup`, if two have the same name or
    key, and for more than 10,000 tenants.
    """
    if not isinstance(tenants, tuple) or not all(type(each) in (Tenant, TenantGroup) for each in tenants):
        raise InvalidArgument(f"tenants is {shown(tenants)}; it must be a tuple of Tenant and TenantGroup")
    groups = [each if isinstance(each, TenantGroup) else _alone(each) for each in tenants]
    if all(group.name != OTHERS for group in groups):
        groups.insert(0, _alone(Tenant(OTHERS)))
    groups.sort(key=lambda group: group.name != OTHERS)
    members = [member for group in groups for member in group.members]
    if len(members) > MAX_TENANTS:
        raise InvalidArgument(f"tenants has {len(members)} tenants, '*' included; the limit is {MAX_TENANTS}")
    if members[0].name != OTHERS or len(groups[0].members) > 1:
        raise InvalidArgument("tenants has '*' as a group or in one; it must be a Tenant outside of groups")
    _require_different([member.name for member in members] + [g.name for g in tenants if isinstance(g, TenantGroup)])
    owners: dict[tuple[str, str], str] = {}
    for member in members:
        for mark in member.marks:
            if owners.setdefault(mark, member.name) != member.name:
                # A salt is a secret: it is not shown.
                raise InvalidArgument(f"tenants has a {mark[0]} that is a key of {owners[mark]!r} and {member.name!r}")
    return tuple(groups)


def _alone(tenant: Tenant) -> TenantGroup:
    return TenantGroup(tenant.name, (tenant,), tenant.weight, tenant.min_blocks)


def _require_different(names: list[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"tenants has the name {name!r} twice; names must be unique")
        seen.add(name)


def shares_of(groups: Sequence[TenantGroup], usable: int) -> list[int]:
    """Return each tenant's quota of `usable` blocks, by number: its guarantee and its part of the rest. O(tenants).

    The rest, after all guarantees, is divided by weight, first among groups, then among their members. `groups` is the
    result of `tenant_groups`.
    """
    rest = usable - sum(group.guarantee for group in groups)
    weights = sum(group.weight for group in groups)
    shares = []
    for group in groups:
        lent = group.guarantee + rest * group.weight // weights - sum(member.min_blocks for member in group.members)
        weight = sum(member.weight for member in group.members)
        shares += [member.min_blocks + lent * member.weight // weight for member in group.members]
    return shares


class Roster:
    """Maps names and extra keys to tenant numbers, in the order of `tenant_groups`; "*" is 0.

    Attributes:
        groups: the result of `tenant_groups`.
        names: names, by tenant number.
        members: tenants, by number.
        group_of: groups, by tenant number.
    """

    def __init__(self, groups: Sequence[TenantGroup]) -> None:
        self.groups = tuple(groups)
        self.members = [member for group in groups for member in group.members]
        self.group_of = [group for group in groups for _ in group.members]
        self.names = [member.name for member in self.members]
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._by_mark = {mark: number for number, member in enumerate(self.members) for mark in member.marks}
        guarantees = {
            group.name: (group.guarantee, sum(member.min_blocks for member in group.members)) for group in groups
        }
        self._guarantees, self._all_guarantees = guarantees, sum(guarantee for guarantee, _ in guarantees.values())

    def number_of(self, keys: tuple[object, ...]) -> int:
        """Return the number of the tenant of a prompt with these plain keys (`plain_keys`). O(keys)."""
        for key in keys:
            if isinstance(key, tuple):
                number = self._by_mark.get((key[0], key[1]))
                if number is None and key[0] == "salt" and SEPARATOR in key[1]:
                    own = key[1].partition(SEPARATOR)[0]
                    number = self._by_mark.get(("salt", own)) if own else 0
                if number is not None:
                    return number
        return 0

    def keys_of(self, name: object, extra_keys: tuple[ExtraKey, ...] | list[ExtraKey]) -> tuple[ExtraKey, ...]:
        """Return the extra keys for a prompt of the tenant called `name`; `extra_keys` unchanged if `name` is None.

        A salt among them is appended to the tenant's own, so that no client can act for another tenant. O(keys). Raises
        `InvalidArgument` for an unknown tenant, and for one that only has adapters.
        """
        keys = tuple(extra_keys)
        if name is None:
            return keys
        number = self._numbers.get(require_str("tenant", name))
        if number is None:
            raise InvalidArgument(f"tenant is {shown(name)}; none of the {len(self.names)} tenants has that name")
        own = "" if number == 0 else next((text for kind, text in self.members[number].marks if kind == "salt"), None)
        if own is None:
            raise InvalidArgument(f"tenant is {shown(name)}, which only has adapters; add a CacheSalt to its keys")
        salts = [key.value for key in keys if isinstance(key, CacheSalt)][:1]
        if number == 0 and not salts and self.number_of(plain_keys(keys)) == 0:
            return keys
        salt = CacheSalt(SEPARATOR.join([own, *salts]) if own or salts else SEPARATOR)
        return (salt, *(key for key in keys if not isinstance(key, CacheSalt)))

    def max_blocks(self, number: int, usable: int, watermark: int) -> int:
        """Return how many blocks the tenant can ever hold in a pool of `usable` blocks. O(1)."""
        member, group = self.members[number], self.group_of[number]
        guarantee, members = self._guarantees[group.name]
        others = members - member.min_blocks
        most = usable - (self._all_guarantees - guarantee) - others
        most = max(most - watermark, min(guarantee - others, most))
        limits = [member.max_held, None if group.max_held is None else group.max_held - others]
        return min([most, *(limit for limit in limits if limit is not None)])
