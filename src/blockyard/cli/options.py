"""Makes commands, and their options that are fields of `CacheConfig`; reads amounts as people write them."""

from __future__ import annotations

import argparse
import re
from typing import Any

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


_BYTES = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES[f"{_letter}b"], _BYTES[f"{_letter}ib"] = 1000**_power, 1024**_power
_TOKENS = {"": 1, "k": 1000, "ki": 1024, "m": 1000**2, "mi": 1024**2}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]*)", re.IGNORECASE | re.ASCII)
_MAX_BYTES = 2**50
_MAX_DIGITS = 40


def parse_memory(name: str, text: str) -> int:
    """Returns the bytes in an amount like 80GiB (1024**3 each) or 80GB (1000**3 each), rounded down.

    name: the option, for the error. Raises `InvalidArgument` for anything else, and above 2**50 bytes.
    """
    match = _match(text)
    unit = "" if match is None else match[2].lower()
    if match is None or unit not in _BYTES:
        raise InvalidArgument(f"{name} is {text!r}; it must be a number and a unit, like 80GiB, 80GB or 512MiB")
    amount = float(match[1]) * _BYTES[unit]
    if amount > _MAX_BYTES:
        raise InvalidArgument(f"{name} is {text!r}; it must be at most {_MAX_BYTES // 2**40} TiB")
    return int(amount)


def parse_lengths(name: str, text: str) -> list[int]:
    """Returns the tokens in a list like 2k,8Ki,32000, in the order given, each once: k is 1,000 and Ki 1,024.

    Raises `InvalidArgument` for anything else, naming it.
    """
    return list(dict.fromkeys(_tokens(name, part.strip()) for part in text.split(",")))


def _tokens(name: str, text: str) -> int:
    match = _match(text)
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


def _match(text: str) -> re.Match[str] | None:
    return _AMOUNT.fullmatch(text.strip()) if len(text) <= _MAX_DIGITS else None
