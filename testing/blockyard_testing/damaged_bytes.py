"""Ways to damage a message, and the errors that may refuse it."""

from __future__ import annotations

import random

from blockyard import InvalidArgument
from blockyard.errors import PeerMismatch
from blockyard.steps import DivergedRank

REFUSED = (InvalidArgument, PeerMismatch, DivergedRank)


def flipped(draw: random.Random, data: bytes, _: bytes) -> bytes:
    """One bit to several."""
    changed = bytearray(data)
    for _bit in range(draw.choice((1, 1, 1, 2, 3, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw: random.Random, data: bytes, _: bytes) -> bytes:
    """From the end, the beginning, or the middle."""
    first = draw.randrange(len(data))
    last = draw.randrange(first, len(data)) + 1
    return draw.choice((data[:first], data[last:], data[:first] + data[last:]))


def extended(draw: random.Random, data: bytes, _: bytes) -> bytes:
    """At the end, or within."""
    place = draw.choice((len(data), draw.randrange(len(data))))
    return data[:place] + draw.randbytes(draw.randrange(1, 20)) + data[place:]


def swapped(draw: random.Random, data: bytes, _: bytes) -> bytes:
    """Two words in each other's place."""
    one, two = (4 * draw.randrange(len(data) // 4) for _ in range(2))
    words = bytearray(data)
    words[one : one + 4], words[two : two + 4] = data[two : two + 4], data[one : one + 4]
    return bytes(words)


def spliced(draw: random.Random, data: bytes, other: bytes) -> bytes:
    """The head of one message on the rest of another."""
    place = draw.randrange(min(len(data), len(other)))
    return data[:place] + other[place:]


DAMAGES = (flipped, cut, extended, swapped, spliced)
