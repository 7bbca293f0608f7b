"""A hash table from numbers to places in the tree of waiting prompts."""

from typing import Final

from mypy_extensions import i64

from ..arrays import zeros_i64
from .nodes import Edge

#: Multiplicative hashing on 31 bits, because most keys are consecutive numbers.
MULTIPLIER: Final[i64] = 1327217885
KEY_MASK: Final[i64] = 2147483647
KEY_BITS: Final[i64] = 31
FEWEST_BITS: Final[i64] = 4


class PlaceTable:
    """An open-addressing table (linear probing, load at most one half) of (key, edge, place). Equal keys may repeat.

    `reserve` allocates; all other operations allocate nothing, because they run within other calls' changes.
    """

    def __init__(self) -> None:
        self.count: i64 = 0
        self._make(FEWEST_BITS)

    def _make(self, bits: i64) -> None:
        size = 1
        for _ in range(bits):
            size *= 2
        keys, places = zeros_i64(size), zeros_i64(size)
        edges: list[Edge | None] = [None] * size
        self.bits = bits
        self.mask: i64 = size - 1
        self.shift: i64 = KEY_BITS - bits
        #: 0 if the slot is empty.
        self.keys = keys
        self.edges = edges
        self.places = places

    def reserve(self, count: i64) -> None:
        """Make room for `count` entries. All or nothing; amortised O(count)."""
        bits = self.bits
        size = self.mask + 1
        while 2 * count > size:
            bits += 1
            size *= 2
        if bits == self.bits:
            return
        larger = PlaceTable()
        larger._make(bits)
        for slot in range(self.mask + 1):
            edge = self.edges[slot]
            if edge is not None:
                larger.insert(self.keys[slot], edge, self.places[slot])
        self.bits = bits
        self.mask = larger.mask
        self.shift = larger.shift
        self.keys = larger.keys
        self.edges = larger.edges
        self.places = larger.places

    def _home(self, key: i64) -> i64:
        return (((key & KEY_MASK) * MULTIPLIER) & KEY_MASK) >> self.shift

    def find(self, key: i64) -> i64:
        """Return the first slot with this key, or -1. O(1) expected."""
        return self._find_from(self._home(key), key)

    def find_next(self, slot: i64, key: i64) -> i64:
        """Return the next slot with this key after `slot`, or -1."""
        return self._find_from((slot + 1) & self.mask, key)

    def _find_from(self, slot: i64, key: i64) -> i64:
        keys = self.keys
        mask = self.mask
        found = keys[slot]
        while found != 0:
            if found == key:
                return slot
            slot = (slot + 1) & mask
            found = keys[slot]
        return -1

    def insert(self, key: i64, edge: Edge, place: i64) -> None:
        """Add an entry; `reserve` must have made room. O(1) expected."""
        keys = self.keys
        slot = self._home(key)
        while keys[slot] != 0:
            slot = (slot + 1) & self.mask
        keys[slot] = key
        self.edges[slot] = edge
        self.places[slot] = place
        self.count += 1

    def find_entry(self, key: i64, edge: Edge) -> i64:
        """Return the slot with this key and edge, or -1."""
        slot = self.find(key)
        while slot >= 0 and self.edges[slot] is not edge:
            slot = self.find_next(slot, key)
        return slot

    def remove(self, gap: i64) -> None:
        """Remove the entry of a slot, and move later ones of the run back, as in `PrefixIndex`. O(1) expected."""
        mask = self.mask
        slot = (gap + 1) & mask
        while self.keys[slot] != 0:
            home = self._home(self.keys[slot])
            if (slot - home) & mask >= (slot - gap) & mask:
                self.keys[gap] = self.keys[slot]
                self.edges[gap] = self.edges[slot]
                self.places[gap] = self.places[slot]
                gap = slot
            slot = (slot + 1) & mask
        self.keys[gap] = 0
        self.edges[gap] = None
        self.count -= 1
