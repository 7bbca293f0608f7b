"""The options `--tenant` and `--tenant-group`: names, API keys, and limits in blocks or percent of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from blockyard.arguments import shown
from blockyard.errors import InvalidArgument
from blockyard.tenants import MAX_SHARE, MAX_TENANTS, Tenant, TenantGroup, tenant_groups

#: Fields of `Tenant` by their names in the options.
_NUMBERS = {
    "weight": "weight",
    "min": "min_blocks",
    "max": "max_held",
    "max-idle": "max_idle",
    "max-retained": "max_retained",
}
_OF_GROUPS = ("weight", "min", "max")
_TEXTS = ("group", "key-env", "key-file")
#: Maximum digits of a number.
_MAX_DIGITS = 12


def add_tenant_options(group: Any) -> None:
    """Add the options for tenants that share the pool (docs/tenants.md)."""
    group.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME[,...]",
        help="give a tenant a share of the pool: acme,weight=3,min=25%%,max=500,key-env=ACME_KEY; min, max, max-idle "
        "and max-retained are blocks, or percent of the pool; key-env or key-file names the tenant's API key; "
        "group=NAME; the name '*' is everybody else; may be repeated; default: one pool for all",
    )
    group.add_argument(
        "--tenant-group",
        action="append",
        default=[],
        metavar="NAME[,...]",
        help="a share that tenants with group=NAME divide: free,weight=1,min=10%%,max=50%%; may be repeated",
    )


def tenant_factory(tenants: Sequence[str], groups: Sequence[str]) -> partial[tuple[Tenant | TenantGroup, ...]] | None:
    """Return a function from the number of usable blocks to the tenants; None if no tenants are given.

    Raises `InvalidArgument` for values that are invalid for every pool.
    """
    if len(tenants) + len(groups) > MAX_TENANTS:
        raise InvalidArgument(f"--tenant is given {len(tenants) + len(groups)} times; the limit is {MAX_TENANTS}")
    asked = partial(
        _made,
        [read_tenant(text) for text in tenants],
        [_read("--tenant-group", text, _OF_GROUPS) for text in groups],
    )
    if not tenants and not groups:
        return None
    tenant_groups(asked(None))
    return asked


def read_tenant(text: str) -> tuple[str, dict[str, str]]:
    """Return the name in a value of `--tenant`, and its settings as text. Raises `InvalidArgument`."""
    return _read("--tenant", text, (*_NUMBERS, *_TEXTS))


def _read(option: str, text: str, known: Sequence[str]) -> tuple[str, dict[str, str]]:
    name, *parts = text.split(",")
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or key not in known or key in given:
            wrong = "twice" if key in given else f"which is none of {', '.join(f'{each}=' for each in known)}"
            raise InvalidArgument(f"{option} {shown(name)} has {shown(part)}, {wrong}")
        given[key] = value
    return name, given


def _made(
    tenants: list[tuple[str, dict[str, str]]], groups: list[tuple[str, dict[str, str]]], num_usable: int | None
) -> tuple[Tenant | TenantGroup, ...]:
    """Return the tenants in a pool of `num_usable` blocks; None checks them without a pool."""
    members: dict[str, list[Tenant]] = {name: [] for name, _ in groups}
    made: list[Tenant | TenantGroup] = []
    for name, given in tenants:
        tenant, group = Tenant(name, **_numbers(name, given, num_usable)), given.get("group")
        if group is not None and group not in members:
            raise InvalidArgument(f"--tenant {shown(name)} has group={group}; there is no --tenant-group of that name")
        (made if group is None else members[group]).append(tenant)
    made += [TenantGroup(name, tuple(members[name]), **_numbers(name, given, num_usable)) for name, given in groups]
    return tuple(made)


def _numbers(name: str, given: dict[str, str], num_usable: int | None) -> dict[str, Any]:
    return {_NUMBERS[key]: _number(name, key, text, num_usable) for key, text in given.items() if key in _NUMBERS}


def _number(name: str, key: str, text: str, num_usable: int | None) -> int:
    is_share = text.endswith("%") and key != "weight"
    digits = text[:-1] if is_share else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS) or (is_share and int(digits) > 100):
        wanted = "a whole number" if key == "weight" else "a number of blocks, or of percent from 0% to 100%"
        raise InvalidArgument(f"{key} of tenant {shown(name)} is {shown(text)}; it must be {wanted}")
    if not is_share:
        return int(digits)
    if num_usable is None:
        return 0 if key == "min" else MAX_SHARE
    return num_usable * int(digits) // 100
