"""Options that are fields of `CacheConfig`: their name, type and help are the field's own."""

from __future__ import annotations

from typing import Any

from ..config import CACHE_FIELDS

_TYPES: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "SHARE"},
    "object": {"metavar": "NAME"},
}


def add_cache_field(group: Any, name: str, note: str = "", **others: Any) -> None:
    """Add `--name-of-the-field`. note: stands behind the help, before the default. others: argparse's own.

    Without a default among `others` the option is None where it was not given, and the field's default holds.
    """
    field = CACHE_FIELDS[name]
    text = f"{field.metadata['help']}{note}"
    if field.type != "bool" and not others.pop("says_default", False):
        text += f"; default: {others.get('default', field.default) or 'none'}"
    group.add_argument(f"--{name.replace('_', '-')}", help=text, **_TYPES[str(field.type)], **others)
