"""Move bytes between buffers and open files, by `preadv` and `pwritev`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .header import BadObject
from .tier import Cause

#: Pieces in one call of the system.
_MOST_PIECES = 512


def read_into(parts: Sequence[memoryview], file: int, at: int) -> None:
    """Fill the parts, one after another, from byte `at` of a file. Raises `BadObject` if the file ends before."""
    for left in _groups(parts):
        while left:
            count = os.preadv(file, left, at)
            if count == 0:
                raise BadObject(Cause.TRUNCATED)
            at, left = at + count, _rest(left, count)


def write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the pieces from the beginning of a file, however little the system takes at once."""
    at = 0
    for left in _groups([memoryview(piece) for piece in pieces]):
        while left:
            count = os.pwritev(file, left, at)
            at, left = at + count, _rest(left, count)


def _groups(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    return (list(pieces[first : first + _MOST_PIECES]) for first in range(0, len(pieces), _MOST_PIECES))


def _rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Returns what of the pieces comes after the first `count` bytes."""
    place = 0
    while place < len(pieces) and count >= len(pieces[place]):
        count -= len(pieces[place])
        place += 1
    return [pieces[place][count:], *pieces[place + 1 :]] if place < len(pieces) else []
