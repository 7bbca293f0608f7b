"""Pool sizes as people write them: 10k, 1.5M, 25% of the working set, or n of them up to all."""

from __future__ import annotations

import re

import numpy as np

from ..arguments import require_int
from ..config import MAX_BLOCKS
from ..errors import InvalidArgument

_UNITS = {"": 1, "k": 1_000, "m": 1_000_000}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([km%]?)", re.IGNORECASE)
MAX_SIZES = 10_000
_MOST_DIGITS = 40


def parse_sizes(text: str, working_set: int) -> list[int]:
    """Blocks of each pool in a list like "1000,10k,1.5M,25%", ascending, without repetitions.

    working_set: what a percentage is of; a share of less than a block is one block. Raises `InvalidArgument` for
    anything else, naming it.
    """
    sizes = {_parse_size(part.strip(), working_set) for part in text.split(",")}
    if len(sizes) > MAX_SIZES:
        raise InvalidArgument(f"blocks names {len(sizes)} sizes; it may name at most {MAX_SIZES}")
    return sorted(sizes)


def _parse_size(text: str, working_set: int) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"blocks has {text!r}; a size is a number, like 1000, 10k, 1.5M, or a share, like 25%")
    if len(match[1]) > _MOST_DIGITS:
        raise InvalidArgument(f"blocks has a number of {len(match[1])} digits; it must be at most {MAX_BLOCKS}")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        return require_int("blocks", max(round(number * working_set / 100), 1), 1, MAX_BLOCKS)
    blocks = number * _UNITS[unit]
    if blocks != round(blocks):
        raise InvalidArgument(f"blocks has {text!r}, which is {blocks:g}; it must be a whole number of blocks")
    return require_int("blocks", round(blocks), 1, MAX_BLOCKS)


def spread_sizes(count: int, largest: int, smallest: int = 1) -> list[int]:
    """At most `count` sizes from `smallest` to `largest`, each about as many times the one before. Ascending."""
    require_int("count", count, 2, MAX_SIZES)
    return sorted({round(size) for size in np.geomspace(smallest, max(largest, smallest), count)})
