"""API keys of tenants, read from the environment or from files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from blockyard.errors import InvalidArgument
from blockyard_engine.cli import read_tenant


def tenant_keys(tenants: Sequence[str]) -> dict[str, str]:
    """Return the API key of each tenant that has one. Raises `InvalidArgument`, which does not show it."""
    from ..http.access import read_key_file  # needs the extra `serve`

    keys: dict[str, str] = {}
    for text in tenants:
        name, given = read_tenant(text)
        if "key-env" in given and "key-file" in given:
            raise InvalidArgument(f"--tenant {name} has key-env and key-file; give one of the two")
        if "key-file" in given:
            keys[name] = read_key_file(given["key-file"])
        elif "key-env" in given:
            keys[name] = key_in("key-env", given["key-env"])
    return keys


def say_who_is_refused(api_key: str | None, keys: Mapping[str, str]) -> None:
    """Say on stderr that requests without a tenant's key will be refused, where the server has no key of its own."""
    if keys and api_key is None:
        print(
            f"blockyard: only requests with the API key of a tenant are taken ({len(keys)} tenants have one), and "
            f"/check and /ui are closed: the server has no key of its own (--api-key-env)",
            file=sys.stderr,
        )


def key_in(option: str, variable: str) -> str:
    """Return the key in an environment variable. Raises `InvalidArgument`, which does not show it."""
    from ..http.access import require_key  # needs the extra `serve`

    key = os.environ.get(variable)
    if key is None:
        raise InvalidArgument(f"{option} is {variable}; there is no such environment variable")
    return require_key(f"the key in {variable}", key)
