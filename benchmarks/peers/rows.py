"""The rows of the comparison, by name: what each counts, in which unit, at which sizes."""

from __future__ import annotations

from dataclasses import dataclass

from ..workload import SIZES

LOOK_UP_BUFFER = "lookup"
LOOK_UP_LIST = "lookup (list)"
LEASE = "lookup + lease + release"
PUBLISH = "allocate + publish"
EVICTING = "allocate + publish, evicting"
FREE = "free"
LEAF = "one block, evicting a leaf"
DECODE = "decode step"
LIFE = "life of the trace"

NUM_SEQS = 1024
#: How many leaves stand in the cache while one block is allocated, published and freed.
LEAF_SIZES = SIZES[:2]


@dataclass(frozen=True)
class Row:
    """A line of the table: nanoseconds are shown divided by `scale`."""

    name: str
    size: int
    text: str
    unit: str
    scale: float


def _sized(name: str, text: str, sizes: tuple[int, ...] = SIZES) -> list[Row]:
    return [Row(name, size, text, "ns", 1.0) for size in sizes]


ROWS = (
    *_sized(LOOK_UP_BUFFER, "lookup, a hit block, from a buffer"),
    *_sized(LOOK_UP_LIST, "lookup, a hit block, from a list"),
    *_sized(LEASE, "lookup, hold and release, a hit block"),
    *_sized(PUBLISH, "allocate + publish a new block"),
    *_sized(EVICTING, "allocate + publish, evicting another"),
    *_sized(FREE, "free a block"),
    *_sized(LEAF, "a prompt of one block, evicting one of as many leaves", LEAF_SIZES),
    Row(DECODE, NUM_SEQS, "decode step, mean of 16", "us", 1e3),
    *(Row(LIFE, size, "1,500 requests of the trace", "s", 1e9) for size in SIZES),
)


@dataclass(frozen=True)
class Measured:
    """What one manager took for one row: median nanoseconds, and the tokens it hit where that is part of the row."""

    name: str
    size: int
    value: float
    hit_tokens: int | None = None
