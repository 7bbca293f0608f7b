"""API keys of tenants, from the environment or files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from blockyard.errors import InvalidArgument
from blockyard_engine.cli import read_tenant


def tenant_keys(tenants: Sequence[str]) -> dict[str, str]:
    """Return the API keys of tenants by name. Raises `InvalidArgument`, which does not show the key."""
    from ..http.access import read_key_file  # needs the extra `serve`

    keys: dict[str, str] = {}
    for text in tenants:
        name, given = read_tenant(text)
        if "key-env" in given and "key-file" in given:
            raise InvalidArgument(f"--tenant {name} has both key-env and key-file; give only one")
        if "key-file" in given:
            keys[name] = read_key_file(given["key-file"])
        elif "key-env" in given:
            keys[name] = key_in("key-env", given["key-env"])
    return keys


def key_in(option: str, variable: str) -> str:
    """Return the key in an environment variable. Raises `InvalidArgument`, which does not show the key."""
    from ..http.access import require_key  # needs the extra `serve`

    key = os.environ.get(variable)
    if key is None:
        raise InvalidArgument(f"{option} is {variable}; this environment variable is not set")
    return require_key(f"the key in {variable}", key)
