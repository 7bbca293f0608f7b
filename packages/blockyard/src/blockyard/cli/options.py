"""Helpers for defining commands and options, including options that are fields of `CacheConfig`."""

from __future__ import annotations

import argparse
from typing import Any

from ..amounts import amount_of
from ..cache_options import MAX_MODEL_LEN
from ..config import CACHE_FIELDS
from ..errors import InvalidArgument

_TYPES: dict[str, dict[str, Any]] = {
    "bool": {"action": "store_true"},
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "SHARE"},
    "object": {"metavar": "NAME"},
}


def add_command(commands: Any, name: str, line: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add a parser to argparse's `commands`.

    Args:
        commands: argparse's subparsers.
        name: name of the command.
        line: its line in the list of commands.
        description: text before the options.
        epilog: text after the options.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=line,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_cache_field(group: Any, name: str, note: str = "", **others: Any) -> None:
    """Add `--name-of-the-field` for a field of `CacheConfig`.

    Without a default in `others`, an option that was not given is None, and the field's default applies.

    Args:
        group: argparse group or parser.
        name: name of the field.
        note: text after the help, before the default.
        others: further arguments for argparse.
    """
    field = CACHE_FIELDS[name]
    text = f"{field.metadata['help']}{note}"
    if field.type != "bool" and not others.pop("says_default", False):
        text += f"; default: {others.get('default', field.default) or 'none'}"
    group.add_argument(f"--{name.replace('_', '-')}", help=text, **_TYPES[str(field.type)], **others)


_TOKENS = {"": 1, "k": 1000, "ki": 1024, "m": 1000**2, "mi": 1024**2}


def parse_lengths(name: str, text: str) -> list[int]:
    """Return the token counts of a list like 2k,8Ki,32000, in order, without duplicates. k is 1,000 and Ki is 1,024.

    Raises `InvalidArgument` for anything else.
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
