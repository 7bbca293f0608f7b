"""Amounts of memory and numbers with a unit, as written in options: 80GiB, 512MB."""

from __future__ import annotations

import re

from .errors import InvalidArgument

_BYTES = {"b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES[f"{_letter}b"], _BYTES[f"{_letter}ib"] = 1000**_power, 1024**_power
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+) *([a-z]*)", re.IGNORECASE | re.ASCII)
_MAX_BYTES = 2**50
_MAX_DIGITS = 40


def parse_memory(name: str, text: str) -> int:
    """Return the bytes of an amount like 80GiB (1024**3 each) or 80GB (1000**3 each), rounded down.

    Args:
        name: name of the option, for the error message.
        text: the amount.

    Raises:
        InvalidArgument: `text` is not an amount, or is above 2**50 bytes.
    """
    match = amount_of(text)
    unit = "" if match is None else match[2].lower()
    if match is None or unit not in _BYTES:
        raise InvalidArgument(f"{name} is {text!r}; it must be a number and a unit, like 80GiB, 80GB or 512MiB")
    amount = float(match[1]) * _BYTES[unit]
    if amount > _MAX_BYTES:
        raise InvalidArgument(f"{name} is {text!r}; it must be at most {_MAX_BYTES // 2**40} TiB")
    return int(amount)


def amount_of(text: str) -> re.Match[str] | None:
    """Return a match whose groups are the number and the unit of `text`, or None if it has another form."""
    return _AMOUNT.fullmatch(text.strip()) if len(text) <= _MAX_DIGITS else None
