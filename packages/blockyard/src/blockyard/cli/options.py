"""Makes commands, and their options that are fields of `CacheConfig`; reads amounts as people write them."""

from __future__ import annotations

import argparse
from typing import Any

from ..amounts import amount_of
from ..config import CACHE_FIELDS, MAX_MODEL_LEN
from ..errors import InvalidArgument

_TYPES: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "SHARE"},
    "object": {"metavar": "NAME"},
}


def add_command(commands: Any, name: str, line: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Adds a parser to argparse's `commands`. line: what the list of all commands says of it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=line,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_cache_field(group: Any, name: str, note: str = "", **others: Any) -> None:
    """Add `--name-of-the-field`. note: stands behind the help, before the default. others: argparse's own.

    Without a default among `others` the option is None where it was not given, and the field's default holds.
    """
    field = CACHE_FIELDS[name]
    text = f"{field.metadata['help']}{note}"
    if field.type != "bool" and not others.pop("says_default", False):
        text += f"; default: {others.get('default', field.default) or 'none'}"
    group.add_argument(f"--{name.replace('_', '-')}", help=text, **_TYPES[str(field.type)], **others)


_TOKENS = {"": 1, "k": 1000, "ki": 1024, "m": 1000**2, "mi": 1024**2}


def parse_lengths(name: str, text: str) -> list[int]:
    """Returns the tokens in a list like 2k,8Ki,32000, in the order given, each once: k is 1,000 and Ki 1,024.

    Raises `InvalidArgument` for anything else, naming it.
    """
    return list(dict.fromkeys(_tokens(name, part.strip()) for part in text.split(",")))


def _tokens(name: str, text: str) -> int:
    match = amount_of(text)
    unit = "-" if match is None else match[2].lower()
    if match is None or unit not in _TOKENS:
        raise InvalidArgument(
            f"{name} has {text!r}; a length is a number of tokens, like 2000, 2k (2,000) or 2Ki (2,048)"
        )
    tokens = float(match[1]) * _TOKENS[unit]
    if tokens != int(tokens) or not 1 <= tokens <= MAX_MODEL_LEN:
        raise InvalidArgument(
            f"{name} has {text!r}, which is {tokens:g}; it must be a whole number from 1 to {MAX_MODEL_LEN}"
        )
    return int(tokens)
