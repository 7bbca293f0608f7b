"""Amounts of memory as a plan is given them."""

from __future__ import annotations

from ...arguments import require_number
from ...errors import InvalidArgument

GIB = 2**30
MAX_GIB = 2**20


def require_gib(name: str, value: object, above_zero: bool = False) -> float:
    """`value` if it is a number of GiB from 0 (or above it) to 2**20."""
    number = require_number(name, value)
    if number < 0 or number > MAX_GIB or (above_zero and int(number * GIB) == 0):
        low = "above 0" if above_zero else "at least 0"
        raise InvalidArgument(f"{name} is {value!r}; it must be {low} and at most {MAX_GIB}, in GiB")
    return number
