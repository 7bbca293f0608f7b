"""Reads and writes files from and into lists of buffers, by `preadv` and `pwritev`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from .header import BadObject
from .tier import Cause

#: Buffers in one system call.
_MAX_BUFFERS = 512


def read_into(parts: Sequence[memoryview], file: int, at: int) -> None:
    """Fill the buffers, one after another, from byte `at` of a file. Raises `BadObject` if the file is too short."""
    for left in _groups(parts):
        while left:
            count = os.preadv(file, left, at)
            if count == 0:
                raise BadObject(Cause.TRUNCATED)
            at, left = at + count, _rest(left, count)


def write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write the buffers from the beginning of a file, in as many calls as the system needs."""
    at = 0
    for left in _groups([memoryview(piece) for piece in pieces]):
        while left:
            count = os.pwritev(file, left, at)
            at, left = at + count, _rest(left, count)


def _groups(pieces: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    return (list(pieces[first : first + _MAX_BUFFERS]) for first in range(0, len(pieces), _MAX_BUFFERS))


def _rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first `count` bytes."""
    at = 0
    while at < len(pieces) and count >= len(pieces[at]):
        count -= len(pieces[at])
        at += 1
    return [pieces[at][count:], *pieces[at + 1 :]] if at < len(pieces) else []
