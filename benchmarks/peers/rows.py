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

AGED, SHUFFLED = "aged", "shuffled"
#: As the pool was made: rows whose time does not depend on where blocks lie.
NEW = ""

NUM_SEQS = 1024
#: How many leaves stand in the cache while one block is allocated, published and freed.
LEAF_SIZES = SIZES[:2]


@dataclass(frozen=True)
class Row:
    """A line of the table: nanoseconds are shown divided by `scale`."""

    name: str
    size: int
    layout: str
    text: str
    unit: str
    scale: float


def _in_layouts(name: str, text: str) -> list[Row]:
    return [Row(name, size, layout, text, "ns", 1.0) for layout in (AGED, SHUFFLED) for size in SIZES]


ROWS = (
    *_in_layouts(LOOK_UP_BUFFER, "lookup, a hit block, from a buffer"),
    *_in_layouts(LOOK_UP_LIST, "lookup, a hit block, from a list"),
    *_in_layouts(LEASE, "lookup, hold and release, a hit block"),
    *_in_layouts(PUBLISH, "allocate + publish a new block"),
    *_in_layouts(EVICTING, "allocate + publish, evicting another"),
    *_in_layouts(FREE, "free a block"),
    *(Row(LEAF, size, NEW, "a prompt of one block, evicting one of as many leaves", "ns", 1.0) for size in LEAF_SIZES),
    Row(DECODE, NUM_SEQS, NEW, "decode step, mean of 16", "us", 1e3),
    *(Row(LIFE, size, NEW, "1,500 requests of the trace", "s", 1e9) for size in SIZES),
)


@dataclass(frozen=True)
class Measured:
    """What one manager took for one row: the least nanoseconds of its rounds, and the tokens that it hit."""

    name: str
    size: int
    value: float
    layout: str = NEW
    hit_tokens: int | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        """What names the row."""
        return self.name, self.size, self.layout
